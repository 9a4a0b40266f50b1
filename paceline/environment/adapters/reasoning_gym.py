"""Tasks of reasoning-gym: generated questions, scored by the task itself. One turn.

`rollout.environment = "reasoning-gym:leg_counting"`. The arguments are those of the task, for
example `{max_animals = 3}`; `size` is the number of questions. The whole completion is the answer,
or what it has in <answer> tags.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from paceline.environment.protocol import Message, Reply
from paceline.errors import ConfigError

SIZE = 2000  # rows, unless the arguments say otherwise


class ReasoningGym:
    def __init__(self, name: str, **arguments: Any) -> None:
        self._task = _task(name, json.dumps(arguments), 0)

    @staticmethod
    def rows(seed: int, name: str, **arguments: Any) -> list[dict[str, Any]]:
        """Return the questions of a seed; those of evaluations have another one."""
        task = _task(name, json.dumps({"size": SIZE, **arguments}), seed)
        return [{"prompt": entry["question"], "entry": entry} for entry in task]

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        self._entry = row["entry"]
        return None

    async def step(self, message: Message) -> Reply:
        from reasoning_gym.utils import extract_answer

        text = message["content"]
        answer = extract_answer(text) or text.strip()
        return Reply(reward=float(self._task.score_answer(answer, self._entry)), done=True)


@cache
def _task(name: str, arguments: str, seed: int) -> Any:
    """Make the task once for all episodes; scoring does not depend on the seed."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    setting = f"rollout.environment = 'reasoning-gym:{name}'"
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{setting}: unknown task{hint}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, **json.loads(arguments))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{setting}: wrong rollout.environment_args: {error}") from None
