"""LoRA: only adapters are trained, exported weights are merged, the base model is the reference."""

import copy
import json
import sys
import weakref
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.errors import CheckpointError, ConfigError
from paceline.model.weights import DecoderWeights
from paceline.training.lora import LoraDevice, MergedWeights, adapted_layers
from paceline.training.settings import LoraSettings, TrainSettings
from paceline.training.single import SingleDevice
from tests.architectures import tiny_architecture
from tests.contract.test_train_engine import (
    LOSS,
    MODELS,
    TEMPERATURE,
    plain_logprobs,
    random_batch,
    same_bits,
    tiny,
    weights_of,
)

SETTINGS = TrainSettings(lora=LoraSettings(rank=4, alpha=8))


def lora(name: str = "qwen2-tied", settings: TrainSettings = SETTINGS, seed: int = 0) -> LoraDevice:
    return LoraDevice(tiny(name), settings, TEMPERATURE, seed)


def trained(
    name: str = "qwen2-tied", settings: TrainSettings = SETTINGS, steps: int = 2
) -> LoraDevice:
    engine = lora(name, settings)
    for step in range(steps):
        train(engine, step)
    return engine


def train(engine: SingleDevice, seed: int) -> None:
    engine.forward_backward(random_batch(seed=seed), LOSS)
    engine.optimizer_step(1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_new_adapters_do_not_change_model(name: str) -> None:
    assert same_bits(weights_of(lora(name)), dict(tiny(name).state_dict()))
    plain = SingleDevice(tiny(name), TrainSettings(), TEMPERATURE)
    assert (lora(name).logprobs(random_batch()) == plain.logprobs(random_batch())).all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_merged_weights_give_same_logprobs_in_plain_model(name: str, checkpointing: bool) -> None:
    engine = trained(name, SETTINGS.model_copy(update={"gradient_checkpointing": checkpointing}))
    model, batch = tiny(name), random_batch(seed=9)
    with torch.no_grad():
        before, _ = plain_logprobs(model, batch)
        model.load_state_dict(dict(engine.export_weights()))
        merged, _ = plain_logprobs(model, batch)
    found = engine.logprobs(batch)[batch.mask]
    assert np.abs(found - merged.numpy()).max() < 1e-5
    assert np.abs(found - before.numpy()).max() > 1e-2, (
        "training must change the log-probs, or the comparison shows nothing"
    )


def test_adapter_gradient_matches_peft() -> None:
    engine, batch = trained(steps=1), random_batch(seed=3)
    reference = peft.get_peft_model(
        tiny("qwen2-tied"), peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    wrapped = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            wrapped[f"base_model.model.{name}"].copy_(parameter)
    logprobs, _ = plain_logprobs(reference, batch)
    engine.forward_backward(batch, Sum())
    logprobs.sum().backward()
    for name, parameter in engine.model.named_parameters():
        other = wrapped[f"base_model.model.{name}"].grad
        assert (parameter.grad is None) == (other is None) == (".lora_" not in name)
        if parameter.grad is not None and other is not None:
            assert torch.allclose(parameter.grad, other, atol=1e-4), name


class Sum:
    """The sum of log-probs as a loss."""

    def weights(self, batch):  # type: ignore[no-untyped-def]
        return np.ones(batch.num_tokens, np.float32)

    def __call__(self, outputs, data):  # type: ignore[no-untyped-def]
        from paceline.algo.loss import LossTerms

        return LossTerms(outputs.logprobs.sum(), {}, {})


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    engine = trained()
    base = tiny("qwen2-tied").state_dict()
    for name, parameter in engine.model.named_parameters():
        if ".lora_" not in name:
            assert not parameter.requires_grad and parameter.grad is None
            assert torch.equal(parameter, base[name.replace(".base_layer.", ".")])
    count = 2 * 2 * 7  # layers x (A and B) x linear layers of attention and MLP
    assert len(engine._parameters) == len(engine._optimizer.state) == count


def test_loading_merged_weights_holds_at_most_two_tensors() -> None:
    engine = trained()
    weights = DecoderWeights.from_module(tiny("qwen2-tied"), share=False)
    alive: list[int] = []

    class Counted(MergedWeights):
        def __getitem__(self, name: str) -> torch.Tensor:
            tensor = super().__getitem__(name).clone()
            alive.append(1)
            weakref.finalize(tensor, alive.pop)
            assert len(alive) <= 2
            return tensor

    weights.load(Counted(engine.model))
    assert same_bits(weights.named | {"lm_head.weight": weights.head}, weights_of(engine))


def test_adapters_off_gives_base_model_without_affecting_training() -> None:
    engine, other, batch = trained(), trained(), random_batch(seed=4)
    base = SingleDevice(tiny("qwen2-tied"), TrainSettings(), TEMPERATURE).logprobs(batch)
    with engine.adapters_off():
        assert (engine.logprobs(batch) == base).all()
    assert not (engine.logprobs(batch) == base).all()
    for each in (engine, other):
        train(each, 5)
    assert same_bits(weights_of(engine), weights_of(other))


def test_loaded_adapters_continue_training_bit_for_bit(tmp_path: Path) -> None:
    engine, other = trained(), lora(seed=7)
    engine.save(tmp_path)
    assert not same_bits(weights_of(engine), weights_of(other))
    other.load(tmp_path)
    for step in (5, 6):
        assert same_bits(weights_of(engine), weights_of(other))
        train(engine, step)
        train(other, step)
    assert same_bits(weights_of(engine), weights_of(other))


def test_checkpoint_contains_merged_model_and_peft_adapter(
    tmp_path: Path,
) -> None:
    engine, batch = trained(), random_batch(seed=9)
    engine.save(tmp_path)
    assert same_bits(
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / "actor").state_dict()),
        weights_of(engine),
    )
    adapter = tmp_path / "actor" / "adapter"
    adapted = peft.PeftModel.from_pretrained(tiny("qwen2-tied"), adapter)
    with torch.no_grad():
        found, _ = plain_logprobs(adapted, batch)
    assert np.abs(found.numpy() - engine.logprobs(batch)[batch.mask]).max() < 1e-5
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4


def test_adapters_depend_on_seed_and_not_on_global_rng() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model = copy.deepcopy(tiny("llama"))
    torch.manual_seed(3)
    one = LoraDevice(model, SETTINGS)
    assert torch.rand(1) == expected
    layer = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    assert torch.equal(one._parameters[layer], lora("llama")._parameters[layer])
    assert not torch.equal(one._parameters[layer], lora("llama", seed=1)._parameters[layer])


def test_load_rejects_checkpoint_of_other_rank(tmp_path: Path) -> None:
    trained().save(tmp_path)
    problem = r"adapter_model\.safetensors belongs to another model: "
    shapes = r"the shape of \S*lora_A\.weight is \(4, 48\) there and \(2, 48\)"
    with pytest.raises(CheckpointError, match=problem + shapes):
        lora(settings=TrainSettings(lora=LoraSettings(rank=2))).load(tmp_path)


def test_targets_select_known_layers() -> None:
    engine = lora(settings=TrainSettings(lora=LoraSettings(targets=("q_proj", "v_proj"))))
    assert {name.split(".")[-2] for name in adapted_layers(engine.model)} == {"q_proj", "v_proj"}


def test_targets_reject_unknown_layers() -> None:
    problem = r"train\.lora\.targets contains 'lm_head'; "
    expected = "expected .* Qwen2ForCausalLM: down_proj, gate_proj"
    with pytest.raises(ConfigError, match=problem + expected):
        lora(settings=TrainSettings(lora=LoraSettings(targets=("q_proj", "lm_head"))))


def test_targets_reject_part_of_fused_experts() -> None:
    settings = TrainSettings(lora=LoraSettings(targets=("gate_proj",)))
    with pytest.raises(
        ConfigError, match=r"train\.lora\.targets = \['gate_proj'\].*also .*up_proj"
    ):
        LoraDevice(tiny_architecture("deepseek_v3"), settings)


def test_error_names_extra_when_peft_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[lora\]'"):
        lora()
