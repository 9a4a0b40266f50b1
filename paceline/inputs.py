"""Inputs of a run: model, tokenizer and prompts, loaded and checked before anything starts."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from paceline.algo.custom import check_custom
from paceline.config import SINKS, RunConfig
from paceline.data.source import Prompts, open_source
from paceline.data.tiny import resolve_model
from paceline.data.tiny_reward import resolve_reward_model
from paceline.errors import ConfigError, ModelError
from paceline.model.gguf_cache import report_conversion
from paceline.model.loading import (
    load_config,
    load_generation_config,
    load_tokenizer,
    model_fingerprint,
)
from paceline.model.shape import position_limit
from paceline.model.support import FAST, check_generates, is_fast
from paceline.plugins import PluginError
from paceline.reward.model import check_reward_model
from paceline.rollout.vllm_settings import check_vllm

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    source: Prompts
    identity: dict[str, Any]

    def with_config(self, config: RunConfig) -> "Inputs":
        """Return these inputs of a run whose automatic settings have been chosen."""
        return replace(self, identity={**self.identity, "config": config.model_dump(mode="json")})


def prepare_model(config: RunConfig, progress: Callable[[int, int], None] | None = None) -> None:
    """Create the built-in model or convert a GGUF file, if the run uses one for the first time."""
    resolve_model(config.model, config.data.task, progress)


def load_inputs(config: RunConfig, rows: Iterable[Mapping[str, Any]] | None = None) -> Inputs:
    """Load and check the inputs. `rows` of the program replace the prompts of the settings."""
    check_custom(config.algorithm)
    check_sinks(config)
    model_path = resolve_model(config.model, config.data.task)
    report_conversion(config.model, model_path)
    tokenizer = load_tokenizer(model_path)
    source = open_source(config.data, tokenizer, config.seed, rows)
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
    return Inputs(model_path, tokenizer, load_generation_config(model_path), source, identity)


def check_sinks(config: RunConfig) -> None:
    """Import every sink, so that a wrong name fails before the run starts."""
    for sink in config.track:
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
            log.warning(
                "model_type %r has no fast path (%s without a sliding window have one): the engine "
                "generates with the module of transformers, which is slower",
                model.model_type,
                ", ".join(FAST),
            )
    if source.highest_token >= text.vocab_size:
        raise ModelError(
            f"{model_path}: token ID {source.highest_token} in a prompt exceeds the model's "
            f"vocabulary of {text.vocab_size}: the tokenizer does not belong to this model; "
            "use the matching tokenizer files"
        )
    _check_positions(model, source, response_length)


def _check_positions(model: PretrainedConfig, source: Prompts, response_length: int) -> None:
    text, end = model.get_text_config(), position_limit(model)
    if end is not None and source.longest >= end:
        raise ModelError(
            f"the model has {end} positions, and the longest prompt has {source.longest} tokens: "
            "exclude long prompts (data.max_prompt_length, data.on_bad_row = 'skip')"
        )
    if end is not None and source.longest + response_length > end:
        log.warning(
            "the model has %d positions: completions end there (the longest prompt has %d tokens)",
            end,
            source.longest,
        )
        return
    rope = getattr(text, "rope_parameters", None) or {}
    trained = getattr(text, "max_position_embeddings", None) or float("inf")
    trained *= rope.get("factor", 1.0)
    if source.longest + response_length > trained:
        log.warning(
            "the model was trained on %d tokens; the longest prompt has %d and "
            "rollout.max_response_length = %d: completions beyond that may be noise",
            trained,
            source.longest,
            response_length,
        )
