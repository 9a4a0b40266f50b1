"""Checks of a model before a run starts: end tokens, architecture, positions and tokenizer."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
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
from paceline.model.loading import load_config, load_generation_config, load_model
from paceline.model.shape import model_shape
from paceline.rollout.native.engine import NativeEngine
from paceline.supervised.config import load_sft_config
from paceline.supervised.inputs import load_sft_inputs
from paceline.types import Request, Sampling
from tests.models import random_model

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def gpt2(positions: int) -> GPT2Config:
    size = len(make_tokenizer())
    return GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=positions)


def chosen(model: str, *more: str) -> RunConfig:
    return load_settings(
        None,
        [f"model={model}", "data.task=copy:3", "data.limit=8", "data.max_prompt_length=64", *more],
    )


def test_generation_config_file_overrides_end_tokens_of_config(tmp_path: Path) -> None:
    folder = Path(random_model(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 9]}))
    (folder / "generation_config.json").unlink()
    assert load_generation_config(str(folder)).eos_token_id == [2, 9]
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(folder)
    assert load_generation_config(str(folder)).eos_token_id == [2, 7]


@pytest.mark.parametrize("content", ['{"eos_token_id": ', "[2]", '{"max_new_tokens": -1}'])
def test_generation_config_fails_when_its_file_is_damaged(tmp_path: Path, content: str) -> None:
    folder = Path(random_model(tmp_path))
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json: .*; correct the file"):
        load_generation_config(str(folder))


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({"model_type": "unheard"}, "update transformers, or use another model"),
        (
            {"model_type": "unheard", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
            "Paceline runs no custom code; use a model that transformers itself supports",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "use the model without quantization",
        ),
        ({"rope_parameters": {"rope_type": "unheard"}}, "check its files, or download it again"),
    ],
)
def test_load_says_what_to_do_when_transformers_cannot_load_model(
    tmp_path: Path, changes: dict[str, Any], action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(random_model(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks the user"))
    with pytest.raises(ModelError, match=f"cannot load the model in .*; {action}$"):
        load_model(str(folder))


def test_load_warns_when_architecture_has_no_fast_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(GPT2LMHeadModel(gpt2(positions=80)), tmp_path)
    load_inputs(chosen(model, "rollout.max_response_length=16"))
    assert "'gpt2' has no fast path" in caplog.text and "slower" in caplog.text
    assert "llama" in caplog.text


def test_completion_ends_when_model_has_no_more_positions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = gpt2(positions=24)
    model = GPT2LMHeadModel(shape)
    load_inputs(chosen(saved(model, tmp_path), "rollout.max_response_length=30"))
    assert "the model has 24 positions: completions end there" in caplog.text
    engine = NativeEngine(
        shape, engine_weights(model, share=True, max_length=94), slots=2, max_length=94
    )
    engine.submit([Request("r", (3, 4, 5), 0, Sampling(30))])
    while not (done := engine.step()):
        pass
    assert len(done[0][1]) == 21


def test_load_fails_when_prompt_exceeds_positions(tmp_path: Path) -> None:
    model = saved(GPT2LMHeadModel(gpt2(positions=4)), tmp_path)
    with pytest.raises(
        ModelError,
        match=r"the model has 4 positions.*exclude long prompts \(data\.max_prompt_length",
    ):
        load_inputs(chosen(model))


def test_supervised_load_fails_when_row_changes_rotary_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    size = len(make_tokenizer())
    shape = LlamaConfig(**SHAPE, vocab_size=size, rope_parameters=rope, max_position_embeddings=32)
    model = saved(LlamaForCausalLM(shape), tmp_path)
    config = load_sft_config(None, [f"model={model}", "data.chat=false"])
    load_sft_inputs(config, [{"prompt": "a" * 20, "completion": "b" * 10}])  # 32 tokens
    with pytest.raises(
        ModelError, match=r"longer than 32 tokens: tokens of the longest row = 33.*exclude"
    ):
        load_sft_inputs(config, [{"prompt": "a" * 20, "completion": "b" * 11}])


def test_load_fails_when_architecture_keeps_more_than_kv_cache(tmp_path: Path) -> None:
    config = MambaConfig(
        vocab_size=len(make_tokenizer()), hidden_size=16, num_hidden_layers=1, state_size=4
    )
    with pytest.raises(
        ModelError, match=r"'mamba' keeps more than a KV cache.*rollout\.engine = 'vllm'"
    ):
        load_inputs(chosen(saved(MambaForCausalLM(config), tmp_path)))


def test_load_warns_when_sliding_window_is_too_short_for_fast_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = MistralConfig(**SHAPE, vocab_size=len(make_tokenizer()), sliding_window=80)
    model = saved(MistralForCausalLM(shape), tmp_path)
    load_inputs(chosen(model, "rollout.max_response_length=16"))
    assert "slower" not in caplog.text
    load_inputs(chosen(model, "rollout.max_response_length=17"))
    assert "slower" in caplog.text and "64 + 17 tokens" in caplog.text
    assert "exceed the model's sliding window of 80" in caplog.text


def test_load_fails_when_tokenizer_has_more_tokens_than_model(tmp_path: Path) -> None:
    model = saved(
        MistralForCausalLM(MistralConfig(**SHAPE, vocab_size=8, sliding_window=None)), tmp_path
    )
    with pytest.raises(ModelError, match="vocabulary of 8: the tokenizer does not belong"):
        load_inputs(chosen(model))


def test_load_warns_when_completions_exceed_trained_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(tmp_path)  # trained on 256 tokens
    with caplog.at_level(logging.WARNING):
        load_inputs(chosen(model, "rollout.max_response_length=200"))
        assert not caplog.text
        load_inputs(chosen(model, "rollout.max_response_length=256"))
    assert "trained on 256 tokens" in caplog.text


def test_load_fails_when_model_has_no_tokenizer(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(vocab_size=64, **SHAPE)).save_pretrained(tmp_path)
    message = r"has no tokenizer; add the model's tokenizer files \(tokenizer\.json"
    with pytest.raises(ModelError, match=message):
        load_inputs(chosen(str(tmp_path)))


def test_load_fails_when_path_names_unknown_user() -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        load_config("~no-such-user/model")


@pytest.mark.parametrize("reason", ["no such model", "no connection."])
def test_load_error_has_one_period_after_reason_of_hub(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, **options: Any) -> None:
        raise OSError(reason)

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(ModelError, match=f"{reason.strip('.')}\\. Without network"):
        load_config("someone/model")


def with_config(folder: Path, **changes: Any) -> str:
    """Save a model of two layers, then change its config.json."""
    model = random_model(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return model


def test_load_names_weight_whose_shape_is_not_that_of_config(tmp_path: Path) -> None:
    model = with_config(tmp_path, intermediate_size=96)
    with pytest.raises(ModelError, match=r"6 weights .*mlp.*: stored \(.*\), expected .*96"):
        load_model(model)


def test_load_warns_when_config_has_fewer_layers_than_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_config(tmp_path, num_hidden_layers=1, layer_types=None)
    load_model(model)
    load_model(model)
    assert caplog.text.count("does not use 12 of the stored weights") == 1
    assert "'model.layers.1.input_layernorm.weight'" in caplog.text


def test_shape_has_largest_size_when_layers_differ() -> None:
    more = {"head_dim": 8, "global_head_dim": 16, "vocab_size": 64, "num_hidden_layers": 2}
    config = CONFIG_MAPPING["gemma4_text"](**SHAPE | more)
    assert model_shape(config).head_dim == 16
