"""What a run is made from: model, tokenizer, prompts. Loaded, and refused if it cannot work, before anything starts."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from paceline.config import RunConfig
from paceline.data.prompts import PromptSource
from paceline.errors import ModelError
from paceline.model.loading import (
    load_config,
    load_generation_config,
    load_tokenizer,
    model_fingerprint,
    resolve_model,
)
from paceline.model.shape import position_limit
from paceline.model.support import FAST, check_generates, is_fast
from paceline.reward.model import check_reward_model
from paceline.rollout.vllm_settings import check_vllm

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    source: PromptSource
    identity: dict[str, Any]


def prepare_model(config: RunConfig, progress: Callable[[int, int], None] | None = None) -> None:
    """Make the built-in model if the run wants it and it is not there yet."""
    resolve_model(config.model, config.data.task, progress)


def load_inputs(config: RunConfig) -> Inputs:
    model_path = resolve_model(config.model, config.data.task)
    tokenizer = load_tokenizer(model_path)
    source = PromptSource(config.data, tokenizer, config.seed)
    identity = {
        "config": config.model_dump(mode="json"),
        "model": model_fingerprint(model_path),
        "data": source.fingerprint,
    }
    if config.rollout.engine == "vllm":
        check_vllm()
    check_model(config, model_path, source)
    if config.reward.model:
        check_reward_model(config.reward.model)
        identity["reward model"] = model_fingerprint(config.reward.model)
    return Inputs(model_path, tokenizer, load_generation_config(model_path), source, identity)


def check_model(config: RunConfig, model_path: str, source: PromptSource) -> None:
    """Refuse a model that could not do what is asked of it; warn where it would do it badly."""
    model = load_config(model_path)
    shape = model.get_text_config()
    asked, answered = config.data.max_prompt_length, config.rollout.max_response_length
    if config.rollout.engine == "native":
        check_generates(model, asked + answered)
        if not is_fast(model, asked + answered):
            log.warning(
                "model_type %r generates through transformers' own module, slower than what has a fast path: %s without a sliding window",
                model.model_type, ", ".join(FAST),
            )  # fmt: skip
    if source.highest_token >= shape.vocab_size:
        raise ModelError(
            f"{model_path}: a prompt has token {source.highest_token}, but the model knows {shape.vocab_size} tokens; "
            "its tokenizer is not its own"
        )
    rope = getattr(shape, "rope_parameters", None) or {}
    reach = (getattr(shape, "max_position_embeddings", None) or float("inf")) * rope.get(
        "factor", 1.0
    )
    ends = position_limit(model)
    if ends is not None and source.longest >= ends:
        raise ModelError(
            f"the model has no positions beyond {ends} tokens, and the longest prompt has {source.longest}: leave out long ones "
            "(data.max_prompt_length, data.on_bad_row = 'skip')"
        )
    if ends is not None and source.longest + answered > ends:
        log.warning(
            "the model has no positions beyond %d tokens: answers end there (the longest prompt has %d)",
            ends,
            source.longest,
        )
    elif source.longest + answered > reach:
        log.warning(
            "the model was made for %d tokens, the longest prompt has %d and rollout.max_response_length = %d: beyond it may be noise",
            reach, source.longest, answered,
        )  # fmt: skip
