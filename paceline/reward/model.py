"""Reward model: a sequence-classification model with one label that scores prompt and completion.

`RewardModel` runs in the worker, `ModelReward` in the controller. The reward model uses its own
tokenizer and chat template. A score depends only on the group it is computed with, never on timing.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jinja2 import TemplateError
from transformers import AutoModelForSequenceClassification

from paceline.data.chat import conversation, has_template
from paceline.errors import ModelError, RewardError
from paceline.model.loading import load_config, load_model, load_tokenizer
from paceline.remote.device_clock import REWARD
from paceline.remote.worker import Worker
from paceline.types import Prompt, Role, Trajectory

log = logging.getLogger(__name__)

Messages = list[Mapping[str, Any]]


def check_reward_model(name: str) -> None:
    """Raise ModelError if the configuration or the tokenizer is not that of a reward model."""
    config = load_config(name)
    kinds = getattr(config, "architectures", None) or ["of unknown architecture"]
    if not any("SequenceClassification" in kind for kind in kinds):
        raise ModelError(
            f"reward.model = {name!r} is {kinds[0]}; "
            "expected a sequence-classification model with one label"
        )
    if config.num_labels != 1:
        raise ModelError(
            f"reward.model = {name!r} has {config.num_labels} labels; expected one: the score"
        )
    load_tokenizer(name)


class RewardModel:
    """The model and its tokenizer, in the worker."""

    activities: ClassVar = {"score": REWARD}

    def __init__(self, name: str, dtype: str, batch_tokens: int) -> None:
        """Load the model. `batch_tokens`: maximum tokens per forward pass, padding included."""
        check_reward_model(name)
        self.name = name
        self._tokenizer = load_tokenizer(name)
        self._model: Any = load_model(name, dtype, AutoModelForSequenceClassification)
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._batch_tokens = batch_tokens
        self._pad = self._model.config.pad_token_id
        if self._pad is None:
            log.warning(
                "reward model %s defines no pad token; completions are scored one at a time", name
            )

    def score(self, prompt: str, messages: Messages, completions: Sequence[str]) -> list[float]:
        """Return one score per completion of a prompt, given as text and as chat messages.

        Raises RewardError.
        """
        rows = [self._tokens(prompt, messages, completion) for completion in completions]
        longest = max(map(len, rows))
        limit = getattr(self._model.config, "max_position_embeddings", math.inf)
        if longest > limit:
            raise RewardError(
                f"prompt and completion have {longest} tokens; "
                f"reward model {self.name} reads at most {limit}"
            )
        scores = [0.0] * len(rows)
        for batch in self._batches(rows):
            for index, value in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                scores[index] = value
        if not all(map(math.isfinite, scores)):
            raise RewardError(
                f"reward model {self.name} returned {scores}; expected finite numbers"
            )
        return scores

    def _tokens(self, prompt: str, messages: Messages, completion: str) -> list[int]:
        if not has_template(self._tokenizer):
            return self._tokenizer(prompt + completion)["input_ids"]
        conversation = [
            *(dict(message) for message in messages),
            {"role": "assistant", "content": completion},
        ]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        except TemplateError as error:
            raise RewardError(
                f"the chat template of reward model {self.name} rejects the conversation: {error}"
            ) from error
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield row indices in batches of similar length."""
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
        output = self._model(input_ids=ids.to(device), attention_mask=mask.to(device))
        return output.logits[:, 0].float().tolist()


class ModelReward:
    """A Reward over a worker that hosts a `RewardModel`.

    It has no deadline, because on a shared pool a call waits until the other roles are done.
    """

    def __init__(self, worker: Worker, prompt_key: str, system: str | None = None) -> None:
        self._worker, self._prompt_key, self._system = worker, prompt_key, system

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[float]:
        completions = [trajectory.text for trajectory in trajectories]
        messages = conversation(prompt.row[self._prompt_key], self._system)
        try:
            scores: list[float] = await self._worker.call(
                Role.REWARD, "score", prompt.text, messages, completions
            )
        except RewardError as error:
            raise RewardError(f"prompt {prompt.uid!r}: {error}") from error
        return scores

    async def close(self) -> None:
        return  # the worker is closed together with all other workers
