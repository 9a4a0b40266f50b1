"""Environments of Gymnasium, with observations and actions as text.

`rollout.environment = "gymnasium:FrozenLake-v1"`. Arguments, apart from those of `gymnasium.make`:
`instructions` (the begin of the first message), `actions` (names of the actions of a Discrete
space), `observe` and `act` (functions as "file.py:function": observation -> text, text -> action or
None if the text is not an action), and `size` (the number of rows, each with another seed).
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.environment.protocol import Message, Reply
from paceline.environment.tools import in_thread
from paceline.errors import ConfigError
from paceline.plugins import find_callable

_NUMBER = re.compile(r"-?\d{1,9}")


class Gymnasium:
    def __init__(
        self,
        name: str,
        instructions: str = "",
        actions: Sequence[str] = (),
        observe: str | None = None,
        act: str | None = None,
        size: int = 2000,
        **arguments: Any,
    ) -> None:
        self._name, self._instructions, self._actions = name, instructions, actions
        self._observe: Callable[[Any], Any] = find_callable(observe) if observe else str
        self._act = find_callable(act) if act else None
        self._arguments = arguments
        self._env: Any = None  # until reset

    @classmethod
    def rows(cls, seed: int, name: str, size: int = 2000, **arguments: Any) -> list[dict[str, Any]]:
        """Return a row per seed of the environment, which is made once to check it."""
        cls(name, **arguments)._open().close()
        prompt = arguments.get("instructions") or name
        seeds = random.Random(f"{name}/{seed}")
        return [{"prompt": prompt, "seed": seeds.randrange(2**31)} for _ in range(size)]

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        self._env = await in_thread(self._open)
        observation, _ = await in_thread(partial(self._env.reset, seed=row.get("seed")))
        text = f"{self._instructions}\n{self._observe(observation)}".strip()
        return [{"role": "user", "content": text}]

    async def step(self, message: Message) -> Reply:
        action = self._action(message["content"].strip())
        if action is None:
            return Reply(f"This is not an action. Write {self._expected()}.")
        result = await in_thread(partial(self._env.step, action))
        observation, reward, terminated, truncated, _ = result
        return Reply(str(self._observe(observation)), float(reward), bool(terminated or truncated))

    async def close(self) -> None:
        if self._env is not None:
            await in_thread(self._env.close)

    def _open(self) -> Any:
        import gymnasium

        setting = f"rollout.environment = 'gymnasium:{self._name}'"
        try:
            env = gymnasium.make(self._name, **self._arguments)
        except (gymnasium.error.Error, TypeError, ValueError) as error:
            raise ConfigError(f"{setting}: {error}") from None
        spaces = (gymnasium.spaces.Text, gymnasium.spaces.Discrete)
        if self._act is None and not isinstance(env.action_space, spaces):
            raise ConfigError(
                f"{setting}: its actions are {env.action_space}; set environment_args.act to a "
                "function that turns text into an action"
            )
        return env

    def _action(self, text: str) -> Any:
        """Return the action that a message means, or None."""
        space = self._env.action_space
        if self._act is not None:
            return self._act(text)
        if not hasattr(space, "n"):
            return text if text in space else None
        if self._actions:
            # The name of an action may be a part of another one's.
            found = [
                (text.rfind(name) + len(name), len(name), number)
                for number, name in enumerate(self._actions)
                if name in text
            ]
            return max(found)[-1] + int(space.start) if found else None
        numbers = [int(found) for found in _NUMBER.findall(text)]
        return numbers[-1] if numbers and numbers[-1] in space else None

    def _expected(self) -> str:
        names = ", ".join(self._actions)
        return f"one of {names}" if names else f"an action of {self._env.action_space}"
