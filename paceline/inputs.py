"""Inputs of a run: model, tokenizer and prompts, loaded and checked before anything starts."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from paceline.algo.custom import check_custom
from paceline.config import SINKS, TRACKERS, RunConfig
from paceline.data.held_out import SEED_OFFSET, TASK_PROMPTS
from paceline.data.prompts import DataSettings, PromptSource
from paceline.data.source import Prompts, open_source
from paceline.data.tiny import resolve_model
from paceline.data.tiny_reward import resolve_reward_model
from paceline.environment.lookup import locate
from paceline.errors import ConfigError, DataError, ModelError
from paceline.model.gguf_cache import report_conversion
from paceline.model.loading import (
    load_config,
    load_generation_config,
    load_tokenizer,
    model_fingerprint,
)
from paceline.model.shape import position_limit, sliding_window
from paceline.model.support import FAST, check_generates, is_fast
from paceline.plugins import Plugin, PluginError
from paceline.progress import stage
from paceline.reward.model import check_reward_model
from paceline.rollout.vllm_settings import check_vllm

log = logging.getLogger(__name__)

Preparing = Callable[[str, int, int], None]  # (model, steps or bytes done, their total)


@dataclass(frozen=True, slots=True)
class Inputs:
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    source: Prompts
    identity: dict[str, Any]
    held_out: PromptSource | None = None  # prompts of evaluations during training

    def with_config(self, config: RunConfig) -> "Inputs":
        """Return these inputs of a run whose automatic settings have been chosen."""
        return replace(self, identity={**self.identity, "config": config.model_dump(mode="json")})


def prepare_model(config: RunConfig, progress: Preparing | None = None) -> None:
    """Create built-in models and convert GGUF files that the run uses for the first time."""
    for name in (config.model, config.algorithm.teacher):
        if name is not None:
            resolve_model(name, config.data.task, partial(progress, name) if progress else None)


def load_inputs(
    config: RunConfig,
    rows: Iterable[Mapping[str, Any]] | None = None,
    held_out: Iterable[Mapping[str, Any]] | None = None,
) -> Inputs:
    """Load and check the inputs. `rows` of the program replace the prompts of the settings, and
    `held_out` those of evaluations during training."""
    check_custom(config.algorithm)
    check_sinks(config)
    model_path = resolve_model(config.model, config.data.task)
    report_conversion(config.model, model_path)
    stage(f"loading the tokenizer of {config.model}")
    tokenizer = load_tokenizer(model_path)
    stage(f"reading {config.data.path or 'the prompts'}")
    data = _with_environment_rows(config, config.data, held_out=False)
    source = open_source(data, tokenizer, config.seed, rows)
    stage(f"checking {config.model}")
    identity = {
        "config": config.model_dump(mode="json"),
        "model": model_fingerprint(model_path),
        "data": source.fingerprint,
    }
    if config.rollout.engine == "vllm":
        check_vllm()
    check_model(config, model_path, source)
    if config.reward.model:
        reward_model = resolve_reward_model(config.reward.model)
        check_reward_model(reward_model)
        identity["reward model"] = model_fingerprint(reward_model)
    if config.algorithm.teacher:
        teacher = resolve_model(config.algorithm.teacher, config.data.task)
        report_conversion(config.algorithm.teacher, teacher)
        check_teacher(config, teacher, tokenizer, source)
        identity["teacher"] = model_fingerprint(teacher)
    held_out_prompts = _held_out(config, tokenizer, held_out)
    if held_out_prompts is not None:
        check_model(config, model_path, held_out_prompts)
    generation = load_generation_config(model_path)
    return Inputs(model_path, tokenizer, generation, source, identity, held_out_prompts)


def _with_environment_rows(config: RunConfig, data: DataSettings, held_out: bool) -> DataSettings:
    """Return the settings with the rows of the environment, if it brings some and none are set."""
    name = config.rollout.environment
    if name is None or (config.data.has_origin and config.data.task is None):
        return data
    try:
        rows = locate(name, config.rollout.environment_args).rows(held_out)
    except PluginError as problem:
        raise ConfigError(f"rollout.environment = {name!r}: {problem}") from None
    if rows is None:
        return data
    if config.data.task is not None:
        raise ConfigError(
            f"data.task = {config.data.task!r} contradicts rollout.environment = {name!r}, which "
            "brings its own rows; remove data.task"
        )
    limit = data.limit or (TASK_PROMPTS if held_out else None)
    return data.model_copy(update={"source": Plugin(f"environment {name}", rows), "limit": limit})


def _held_out(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Any]] | None,
) -> PromptSource | None:
    settings, data = config.evaluation, config.evaluation.data(config.data)
    given = sorted(settings.model_fields_set - {"solved_at"})  # `paceline evaluate` uses solved_at
    if given and rows is None and not settings.has_data:
        data = _with_environment_rows(config, data, held_out=True)
    if rows is None and not data.has_origin:
        if given:
            names = ", ".join(f"evaluation.{name}" for name in given)
            raise ConfigError(
                f"{names}: there are no held-out prompts; set evaluation.path (for example "
                "'test.jsonl'), or remove the section evaluation"
            )
        return None
    if settings.task and config.data.task and config.reward.function is None:
        own, trained = (task.partition(":")[0] for task in (settings.task, config.data.task))
        if own != trained:
            raise ConfigError(
                f"evaluation.task = {settings.task!r} contradicts data.task = "
                f"{config.data.task!r}, whose reward scores the completions; use {trained!r} with "
                "the same or another difficulty"
            )
    try:
        source = open_source(data, tokenizer, config.seed + SEED_OFFSET, rows)
    except DataError as error:
        raise DataError(f"evaluation: {error}") from error
    if not isinstance(source, PromptSource):
        raise ConfigError(
            "the held-out prompts are a stream without an end; set evaluation.limit to the number "
            "of rows to evaluate on"
        )
    return source


def check_sinks(config: RunConfig) -> None:
    """Import every custom sink, so that a wrong name fails before the run starts."""
    for sink in config.track:
        if str(sink) in TRACKERS:
            continue  # early_checks.py finds their packages
        try:
            sink.load(SINKS)
        except PluginError as problem:
            raise ConfigError(f"track = {str(sink)!r}: {problem}") from problem


def check_model(config: RunConfig, model_path: str, source: Prompts) -> None:
    """Raise ModelError if the model cannot do what the settings ask; warn if it does it badly."""
    model = load_config(model_path)
    text = model.get_text_config()
    prompt_length, response_length = (
        config.data.max_prompt_length,
        config.rollout.max_response_length,
    )
    if config.rollout.engine == "native":
        check_generates(model, prompt_length + response_length)
        if not is_fast(model, prompt_length + response_length):
            window = sliding_window(model) if is_fast(model, 0) else None
            log.warning(
                "%s: the engine generates with the module of transformers, which is slower",
                f"{prompt_length} + {response_length} tokens of prompt and completion exceed the "
                f"model's sliding window of {window}, so there is no fast path"
                if window
                else f"model_type {model.model_type!r} has no fast path ({', '.join(FAST)} have "
                "one, with standard settings)",
            )
    if source.highest_token >= text.vocab_size:
        raise ModelError(
            f"{model_path}: token ID {source.highest_token} in a prompt exceeds the model's "
            f"vocabulary of {text.vocab_size}: the tokenizer does not belong to this model; "
            "use the matching tokenizer files"
        )
    _check_positions(model, source, response_length)


def check_teacher(
    config: RunConfig, teacher: str, tokenizer: PreTrainedTokenizerBase, source: Prompts
) -> None:
    """Raise ModelError if the teacher cannot give log-probs of the student's tokens."""
    other, name = load_tokenizer(teacher), f"algorithm.teacher = {config.algorithm.teacher!r}"
    action = "use a teacher of the same model family"
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        differs = sorted(
            token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)
        )
        raise ModelError(
            f"{name}: its tokenizer has {len(theirs)} tokens, that of model = {config.model!r} "
            f"{len(ours)}, and {len(differs)} differ, for example {differs[0]!r}; expected the "
            f"same vocabulary. Tokens of the student mean nothing to this teacher: {action}"
        )
    for special in ("bos_token", "eos_token"):
        own, its = (getattr(each, f"{special}_id") for each in (tokenizer, other))
        if own != its:
            raise ModelError(
                f"{name}: its {special} is {getattr(other, special)!r} (ID {its}), that of model = "
                f"{config.model!r} is {getattr(tokenizer, special)!r} (ID {own}); expected the "
                f"same special tokens: {action}, or change the tokenizer files of one of them"
            )
    _check_positions(load_config(teacher), source, config.rollout.max_response_length, "teacher")


def _check_positions(
    model: PretrainedConfig, source: Prompts, response_length: int, name: str = "model"
) -> None:
    text, end = model.get_text_config(), position_limit(model)
    if end is not None and source.longest >= end:
        raise ModelError(
            f"the {name} has {end} positions, and the longest prompt has {source.longest} tokens: "
            "exclude long prompts (data.max_prompt_length, data.on_bad_row = 'skip')"
        )
    if end is not None and source.longest + response_length > end:
        log.warning(
            "the %s has %d positions: completions end there (the longest prompt has %d tokens)",
            name,
            end,
            source.longest,
        )
        return
    rope = getattr(text, "rope_parameters", None) or {}
    trained = getattr(text, "max_position_embeddings", None) or float("inf")
    trained *= rope.get("factor") or 1.0
    if source.longest + response_length > trained:
        log.warning(
            "the %s was trained on %d tokens; the longest prompt has %d and "
            "rollout.max_response_length = %d: completions beyond that may be noise",
            name,
            trained,
            source.longest,
            response_length,
        )
