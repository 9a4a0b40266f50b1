"""What a model says of itself: its end tokens, and what it cannot do, before anything starts."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from paceline.config import RunConfig
from paceline.config import load_config as load_settings
from paceline.data.tiny import make_tokenizer
from paceline.errors import ModelError
from paceline.inputs import load_inputs
from paceline.model.engine_weights import engine_weights
from paceline.model.loading import load_generation_config
from paceline.rollout.native.engine import NativeEngine
from paceline.types import Request, Sampling
from tests.models import random_model

SHAPE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1
}  # fmt: skip


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def chosen(model: str, *more: str) -> RunConfig:
    return load_settings(
        None,
        [f"model={model}", "data.task=copy:3", "data.limit=8", "data.max_prompt_length=64", *more],
    )


def test_end_tokens_are_the_models_own_file_or_else_what_its_config_says(tmp_path: Path) -> None:
    folder = Path(random_model(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 9]}))
    (folder / "generation_config.json").unlink()
    assert load_generation_config(str(folder)).eos_token_id == [2, 9]
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(folder)
    assert load_generation_config(str(folder)).eos_token_id == [2, 7]


def test_an_architecture_without_a_fast_path_is_taken_and_said_to_be_slower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(make_tokenizer()), n_embd=16, n_layer=1, n_head=2, n_positions=80
            )
        ),
        tmp_path,
    )
    load_inputs(chosen(model, "rollout.max_response_length=16"))
    assert (
        "'gpt2' generates through transformers' own module, slower" in caplog.text
        and "llama" in caplog.text
    )


def test_where_positions_end_answers_end_and_longer_prompts_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = GPT2Config(
        vocab_size=len(make_tokenizer()), n_embd=16, n_layer=1, n_head=2, n_positions=24
    )
    model = GPT2LMHeadModel(shape)
    load_inputs(chosen(saved(model, tmp_path), "rollout.max_response_length=30"))
    assert "no positions beyond 24 tokens: answers end there" in caplog.text
    engine = NativeEngine(
        shape, engine_weights(model, share=True, max_length=94), slots=2, max_length=94
    )
    engine.submit([Request("r", (3, 4, 5), 0, Sampling(30))])
    while not (done := engine.step()):
        pass
    assert len(done[0][1]) == 21
    shape.n_positions = 4
    shape.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError,
        match=r"no positions beyond 4 tokens.*leave out long ones \(data\.max_prompt_length",
    ):
        load_inputs(chosen(str(tmp_path)))


def test_an_architecture_that_remembers_more_than_keys_and_values_is_refused(
    tmp_path: Path,
) -> None:
    config = MambaConfig(
        vocab_size=len(make_tokenizer()), hidden_size=16, num_hidden_layers=1, state_size=4
    )
    with pytest.raises(
        ModelError, match=r"'mamba' remembers more than keys and values.*rollout\.engine = 'vllm'"
    ):
        load_inputs(chosen(saved(MambaForCausalLM(config), tmp_path)))


def test_a_window_shorter_than_prompt_and_answer_leaves_the_fast_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(
        MistralForCausalLM(
            MistralConfig(**SHAPE, vocab_size=len(make_tokenizer()), sliding_window=80)
        ),
        tmp_path,
    )
    load_inputs(chosen(model, "rollout.max_response_length=16"))
    assert "slower" not in caplog.text
    load_inputs(chosen(model, "rollout.max_response_length=17"))
    assert "slower" in caplog.text and "without a sliding window" in caplog.text


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    model = saved(
        MistralForCausalLM(MistralConfig(**SHAPE, vocab_size=8, sliding_window=None)), tmp_path
    )
    with pytest.raises(ModelError, match="the model knows 8 tokens; its tokenizer is not its own"):
        load_inputs(chosen(model))


def test_answers_beyond_what_the_model_was_made_for_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(tmp_path)  # made for 256
    with caplog.at_level(logging.WARNING):
        load_inputs(chosen(model, "rollout.max_response_length=200"))
        assert not caplog.text
        load_inputs(chosen(model, "rollout.max_response_length=256"))
    assert "made for 256 tokens" in caplog.text


def test_a_model_without_its_tokenizer_is_told_so(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(vocab_size=64, **SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"has no tokenizer; save the model's own beside it \(tokenizer\.json"
    ):
        load_inputs(chosen(str(tmp_path)))
