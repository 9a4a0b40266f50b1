"""Inputs of a supervised run: model, tokenizer and examples, checked before anything starts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from paceline.data.examples import ExampleSettings, ExampleTokenizer
from paceline.data.prompts import PromptSource
from paceline.data.rows import TokenizedRow
from paceline.data.source import Prompts, open_source
from paceline.data.tiny import resolve_model
from paceline.errors import ConfigError, ModelError
from paceline.inputs import check_sinks
from paceline.model.loading import (
    load_config,
    load_generation_config,
    load_tokenizer,
    model_fingerprint,
)
from paceline.model.shape import position_limit
from paceline.model.support import check_rope
from paceline.supervised.config import SftConfig
from paceline.types import Batch

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SftInputs:
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    source: Prompts
    held_out: Sequence[TokenizedRow]
    steps: int
    identity: dict[str, Any]

    def with_config(self, config: SftConfig) -> "SftInputs":
        """Return these inputs of a run whose automatic settings have been chosen."""
        return replace(self, identity={**self.identity, "config": config.model_dump(mode="json")})

    def batch(self, config: SftConfig, step: int) -> Batch:
        """Return the rows of a train step. The last step of the last epoch may have fewer."""
        start = step * config.rows_per_step
        end = start + config.rows_per_step
        if config.steps is None:
            end = min(end, config.epochs * len(self.source))
        return make_batch([self.source.row(seq) for seq in range(start, end)])

    def validation_batches(self, config: SftConfig) -> Iterator[Batch]:
        size = config.rows_per_step
        for start in range(0, len(self.held_out), size):
            yield make_batch(self.held_out[start : start + size])


def load_sft_inputs(
    config: SftConfig, rows: Rows | None = None, validation: Rows | None = None
) -> SftInputs:
    """Load and check the inputs. Rows of the program replace those of the settings."""
    check_sinks(config.worker_config())
    model_path = resolve_model(config.model, config.data.task)
    tokenizer = load_tokenizer(model_path)
    source = open_source(config.data, tokenizer, config.seed, rows, ExampleTokenizer)
    fingerprint = source.fingerprint
    held_out = _held_out(config, tokenizer, source, validation)
    _check_model(model_path, source, held_out)
    identity = {
        "config": config.model_dump(mode="json"),
        "model": model_fingerprint(model_path),
        "data": fingerprint,
    }
    generation = load_generation_config(model_path)
    steps = _steps(config, source)
    return SftInputs(model_path, tokenizer, generation, source, held_out, steps, identity)


def make_batch(rows: Sequence[TokenizedRow]) -> Batch:
    """Concatenate examples. They were not sampled, so they have no log-probs and versions."""
    tokens = np.concatenate([row.tokens for row in rows])
    return Batch(
        tokens=tokens,
        lengths=np.array([len(row.tokens) for row in rows], np.int32),
        mask=np.concatenate([row.mask for row in rows if row.mask is not None]),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), -1, np.int32),
        rewards=np.zeros(len(rows), np.float32),
        groups=np.arange(len(rows), dtype=np.int32),
    )


def _steps(config: SftConfig, source: Prompts) -> int:
    if config.steps is not None:
        return config.steps
    if not isinstance(source, PromptSource):
        raise ConfigError(
            "the data is a stream without a known number of rows, so epochs have no end; set steps "
            "(the number of train steps), or data.limit to use its first rows"
        )
    return math.ceil(config.epochs * len(source) / config.rows_per_step)


def _held_out(
    config: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Prompts,
    given: Rows | None,
) -> list[TokenizedRow]:
    """Return the rows that are not trained; those of `validation.rows` leave the source."""
    settings = config.validation
    if given is None and settings.path is None:
        if settings.rows and not isinstance(source, PromptSource):
            raise ConfigError(
                f"validation.rows = {settings.rows} needs a known number of rows, but the data is "
                "a stream; set data.limit, or give held-out rows as validation.path"
            )
        if isinstance(source, PromptSource) and settings.rows >= len(source):
            raise ConfigError(
                f"validation.rows = {settings.rows}, but the data has {len(source)} rows; set it "
                f"to at most {len(source) - 1}, or to 0 for no validation"
            )
        return source.hold_out(settings.rows) if isinstance(source, PromptSource) else []
    data = _validation_data(config.data, settings.path)
    opened = open_source(data, tokenizer, config.seed, given, ExampleTokenizer)
    if not isinstance(opened, PromptSource):
        raise ConfigError("the validation rows are a stream; expected a list or a dataset")
    return [opened.row(seq) for seq in range(len(opened))]


def _validation_data(data: ExampleSettings, path: str | tuple[str, ...] | None) -> ExampleSettings:
    origin = {"task": None, "path": path, "source": None, "limit": None}
    return data.model_copy(update={**origin, "shuffle": False})


def _check_model(model_path: str, source: Prompts, held_out: Sequence[TokenizedRow]) -> None:
    model = load_config(model_path)
    vocabulary, positions = model.get_text_config().vocab_size, position_limit(model)
    highest = max(source.highest_token, *(int(row.tokens.max()) for row in held_out), 0)
    if highest >= vocabulary:
        raise ModelError(
            f"{model_path}: token ID {highest} in a row exceeds the model's vocabulary of "
            f"{vocabulary}: the tokenizer does not belong to this model; use the matching "
            "tokenizer files"
        )
    longest = max(source.longest, *(len(row.tokens) for row in held_out), 0)
    if positions is not None and longest > positions:
        raise ModelError(
            f"the model has {positions} positions, and the longest row has {longest} tokens: "
            "exclude long rows (data.max_length, data.on_bad_row = 'skip')"
        )
    check_rope(
        model,
        longest,
        "tokens of the longest row",
        "exclude long rows (data.max_length, data.on_bad_row = 'skip')",
    )
