"""A reward model as a role: a sequence-classification model with one label reads prompt and answer and says how good it is.

The worker's part is `RewardModel`, the controller's `ModelReward`. Prompt and answer go through the reward model's own
tokenizer and chat template. A score depends only on the group it is asked with, never on timing.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoModelForSequenceClassification

from paceline.data.chat import conversation, has_template
from paceline.errors import ModelError, RewardError
from paceline.model.loading import load_config, load_model, load_tokenizer
from paceline.remote.worker import Worker
from paceline.types import Prompt, Role, Trajectory

log = logging.getLogger(__name__)

Messages = list[Mapping[str, Any]]


def check_reward_model(name: str) -> None:
    """Refuse what cannot be a reward model, by its configuration alone. Raises ModelError."""
    config = load_config(name)
    kinds = getattr(config, "architectures", None) or ["of unknown kind"]
    if not any("SequenceClassification" in kind for kind in kinds):
        raise ModelError(
            f"reward.model = {name!r} is {kinds[0]}; a reward model is a sequence-classification model with one label"
        )
    if config.num_labels != 1:
        raise ModelError(
            f"reward.model = {name!r} has {config.num_labels} labels; a reward model has one: how good the answer is"
        )
    load_tokenizer(name)


class RewardModel:
    """The worker's end: the model and its tokenizer."""

    def __init__(self, name: str, dtype: str, batch_tokens: int) -> None:
        """`batch_tokens`: tokens per forward pass, padding included."""
        check_reward_model(name)
        self.name = name
        self._tokenizer = load_tokenizer(name)
        self._model: Any = load_model(name, dtype, AutoModelForSequenceClassification)
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._batch_tokens = batch_tokens
        self._pad = self._model.config.pad_token_id
        if self._pad is None:
            log.warning(
                "reward model %s names no pad token, so answers are scored one at a time", name
            )

    def score(self, prompt: str, messages: Messages, answers: Sequence[str]) -> list[float]:
        """One number per answer to the prompt, given as text and as chat messages. Raises RewardError."""
        rows = [self._tokens(prompt, messages, answer) for answer in answers]
        longest, limit = (
            max(map(len, rows)),
            getattr(self._model.config, "max_position_embeddings", math.inf),
        )
        if longest > limit:
            raise RewardError(
                f"prompt and answer have {longest} tokens, reward model {self.name} reads at most {limit}"
            )
        scores = [0.0] * len(rows)
        for batch in self._batches(rows):
            for index, value in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                scores[index] = value
        if not all(map(math.isfinite, scores)):
            raise RewardError(f"reward model {self.name} gave {scores}; expected finite numbers")
        return scores

    def _tokens(self, prompt: str, messages: Messages, answer: str) -> list[int]:
        if not has_template(self._tokenizer):
            plain: list[int] = self._tokenizer(prompt + answer)["input_ids"]
            return plain
        conversation = [
            *(dict(message) for message in messages),
            {"role": "assistant", "content": answer},
        ]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        except TemplateError as error:
            raise RewardError(
                f"the chat template of reward model {self.name} refuses the conversation: {error}"
            ) from error
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Rows of like length go together."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        while order:
            count = 1 if self._pad is None else max(1, self._batch_tokens // len(rows[order[0]]))
            yield order[:count]
            order = order[count:]

    @torch.no_grad()
    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        longest = max(map(len, rows))
        padding = 0 if self._pad is None else self._pad
        ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        device = self._model.device
        values: list[float] = (
            self._model(input_ids=ids.to(device), attention_mask=mask.to(device))
            .logits[:, 0]
            .float()
            .tolist()
        )
        return values


class ModelReward:
    """A Reward over a worker that hosts a `RewardModel`. Has no deadline of its own: in a shared pool it waits for its turn."""

    def __init__(self, worker: Worker, prompt_key: str, system: str | None = None) -> None:
        self._worker, self._prompt_key, self._system = worker, prompt_key, system

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[float]:
        answers = [trajectory.text for trajectory in trajectories]
        messages = conversation(prompt.row[self._prompt_key], self._system)
        try:
            scores: list[float] = await self._worker.call(
                Role.REWARD, "score", prompt.text, messages, answers
            )
        except RewardError as error:
            raise RewardError(f"prompt {prompt.uid!r}: {error}") from error
        return scores

    async def close(self) -> None:
        return  # the worker is closed with all the others
