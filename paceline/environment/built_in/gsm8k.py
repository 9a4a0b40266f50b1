"""GSM8K as an environment: the model may use a calculator before it answers.

The rows are those of the dataset, from data.path with data.prompt_key = "question". The reward is 1
if the last number of the final message is that of the reference answer ("... #### 72").
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.environment.protocol import Message, Reply
from paceline.reward.verify import last_number


class Gsm8k:
    tools = ("calculator",)

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        self._row = row
        return None

    async def step(self, message: Message) -> Reply:
        return Reply(reward=last_number(message["content"], self._row), done=True)
