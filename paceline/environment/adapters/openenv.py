"""Environments that a server of OpenEnv runs, over its WebSocket.

`rollout.environment = "openenv:http://localhost:8000"`. Arguments: `action_key`, the field of the
action that gets the model's message; `observation_key`, the field of the observation that the model
sees (default: all fields, as JSON); `instructions`, the begin of the first message; and `size`, the
number of rows, each with another seed.
"""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.environment.protocol import Message, Reply

_NOT_SHOWN = {"done", "reward", "metadata"}


class OpenEnv:
    def __init__(
        self,
        name: str,
        action_key: str = "message",
        observation_key: str | None = None,
        instructions: str = "",
        size: int = 2000,
    ) -> None:
        self._url, self._action_key, self._observation_key = name, action_key, observation_key
        self._instructions = instructions
        self._client: Any = None  # until reset

    @staticmethod
    def rows(
        seed: int, name: str, instructions: str = "", size: int = 2000
    ) -> list[dict[str, Any]]:
        """Return a row per seed of the environment."""
        seeds = random.Random(f"{name}/{seed}")
        prompt = instructions or name
        return [{"prompt": prompt, "seed": seeds.randrange(2**31)} for _ in range(size)]

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url)
        result = await self._client.reset(seed=row.get("seed"))
        text = f"{self._instructions}\n{self._text(result.observation)}".strip()
        return [{"role": "user", "content": text}]

    async def step(self, message: Message) -> Reply:
        result = await self._client.step({self._action_key: message["content"]})
        text = self._text(result.observation)
        return Reply(text, float(result.reward or 0.0), bool(result.done))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation_key is not None:
            return str(observation[self._observation_key])
        shown = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
        return json.dumps(shown, default=str)
