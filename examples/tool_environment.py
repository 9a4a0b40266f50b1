"""Environment: the model must call a tool before it can answer.

    paceline train recipes/hybrid.toml rollout.environment=examples/tool_environment.py:Lookup

The first message hides the digits of the task. A message of at most two characters asks for them;
the reply shows them, and the next message is the answer, which the reward of the task scores. The
model learns from this reward alone to ask first.

One object is one episode, so state belongs in attributes. Thousands of episodes run at the same
time: await slow operations.
"""

from collections.abc import Mapping
from typing import Any

from paceline import Reply


class Lookup:
    def __init__(self) -> None:
        self.asked = False

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        self.row = row
        return [{"role": "user", "content": "reverse "}]

    async def step(self, message: Mapping[str, Any]) -> Reply:
        text = message["content"].strip()
        if self.asked or len(text) > 2:
            return Reply(done=True)
        self.asked = True
        return Reply([{"role": "tool", "content": "\n" + self.row["prompt"]}])
