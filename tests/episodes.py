"""Episodes without an engine: given texts are the completions of a model."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from paceline.data.prompts import DataSettings
from paceline.environment.conversation import Limits
from paceline.rollout.environment import open_environment
from paceline.types import Completion, Finish, Prompt, Trajectory
from tests.chat_templates import END, chat_tokenizer

DATA = DataSettings(path="rows.jsonl")


class Model:
    """Says the given texts, and remembers what it has seen before each."""

    def __init__(self, *texts: str, template: str = "chatml with tools") -> None:
        self.tokenizer: PreTrainedTokenizerFast = chat_tokenizer(template)
        self.contexts: list[tuple[int, ...]] = []
        self._texts, self._end = texts, END.get(template, "<|im_end|>")

    @property
    def seen(self) -> list[str]:
        return [self.tokenizer.decode(context) for context in self.contexts]

    async def generate(self, context: tuple[int, ...]) -> Completion:
        text = self._texts[len(self.contexts)] + self._end
        self.contexts.append(context)
        tokens = np.array(self.tokenizer.encode(text), np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        return Completion(tokens, zeros, zeros.astype(np.int32), Finish.STOP)

    def play(
        self,
        name: str,
        row: Mapping[str, Any],
        arguments: Mapping[str, Any] | None = None,
        max_length: int = 4000,
    ) -> Trajectory:
        limits = Limits(6, max_length, 60.0)
        loop = open_environment(name, self.tokenizer, DATA, limits, (), arguments)
        return asyncio.run(loop.run(Prompt("row 1", (), "", row), self.generate))


def tokens(trajectory: Trajectory) -> tuple[int, ...]:
    """Return what would be trained on, without the last completion."""
    parts: list[Sequence[int]] = []
    for turn in trajectory.turns:
        parts += [turn.prompt, turn.completion.tokens.tolist()]
    return tuple(token for part in parts[:-1] for token in part)
