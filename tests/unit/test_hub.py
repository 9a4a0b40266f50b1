"""Saved models have the names that `save_pretrained` writes, and transformers reads them whole."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Gemma3Config, Glm4MoeConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from paceline.model.hub_names import HubFormat, persistent_buffers, stored_tensors
from paceline.model.loading import load_model
from paceline.model.tensor_file import TensorFiles, write_shards
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.training.training_state import layout_of
from tests.architectures import ARCHITECTURES, EXPERTS, SHAPE, tiny_architecture
from tests.contract.test_train_engine import LOSS, random_batch

CONVERTED = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_neox")


def saved_names(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = part.get_dtype(), tuple(part.get_shape())
    return found


def check_saved(folder: Path, original: Path, trained: PreTrainedModel) -> None:
    """Compare names with those of `save_pretrained`, and values with the trained module."""
    assert saved_names(folder) == saved_names(original)
    opened, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert type(opened) is type(trained) and opened.dtype == torch.float32
    expected, found = trained.state_dict(), opened.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def randomize_buffers(model: PreTrainedModel) -> None:
    for buffer in persistent_buffers(model).values():
        buffer.normal_()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_model_has_hub_names_and_values_of_module(name: str, tmp_path: Path) -> None:
    model = tiny_architecture(name)
    randomize_buffers(model)
    model.save_pretrained(tmp_path / "original")
    trainer = SingleDevice(load_model(str(tmp_path / "original")), TrainSettings())
    trainer.save(tmp_path)
    check_saved(tmp_path / "actor", tmp_path / "original", trainer.model)
    config = json.loads((tmp_path / "actor" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and config["dtype"] == "float32"


@pytest.mark.parametrize("name", CONVERTED)
def test_trained_model_is_saved_and_restored_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = tiny_architecture(name)
    randomize_buffers(model)
    model.save_pretrained(tmp_path / "original")

    def train(engine: SingleDevice, seed: int) -> None:
        engine.forward_backward(random_batch(seed=seed), LOSS)
        engine.optimizer_step(1e-2)

    engine = SingleDevice(load_model(str(tmp_path / "original")), TrainSettings())
    train(engine, 0)
    engine.save(tmp_path)
    check_saved(tmp_path / "actor", tmp_path / "original", engine.model)
    other = SingleDevice(tiny_architecture(name, seed=1), TrainSettings())
    other.load(tmp_path)
    for seed in (1, 2):
        for tensor, expected in zip(
            other.model.state_dict().values(), engine.model.state_dict().values(), strict=True
        ):
            assert torch.equal(tensor, expected)
        train(engine, seed)
        train(other, seed)


@pytest.mark.parametrize("kind", ["glm4_moe", "gemma3"])
def test_format_matches_save_pretrained_of_other_layouts(kind: str, tmp_path: Path) -> None:
    text = SHAPE | {"head_dim": 8}
    config = Glm4MoeConfig(**text | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1})
    if kind == "gemma3":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        config = Gemma3Config(text_config=text, vision_config=vision)
    model = AutoModelForCausalLM.from_config(config)
    randomize_buffers(model)
    model.save_pretrained(tmp_path / "original")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    form, tensors = HubFormat(opened), stored_tensors(opened)
    (tmp_path / "saved").mkdir()
    stored = (tensor.detach() for _, tensor in form.to_files(tensors.items()))
    write_shards(tmp_path / "saved", form.layout(layout_of(tensors)), stored)
    form.write_config(opened.config, tmp_path / "saved")
    check_saved(tmp_path / "saved", tmp_path / "original", opened)


def test_format_converts_layers_one_by_one() -> None:
    model = tiny_architecture("qwen3_moe")
    tensors, stored = stored_tensors(model), []
    form = HubFormat(model)

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            if ".layers.1." in name and "mlp" in name:
                assert any(".layers.0.mlp.experts.3." in name for name in stored)
            yield name, tensor

    for name, _ in form.to_files(arriving()):
        stored.append(name)
    assert sum(".layers.1.mlp.experts." in name for name in stored) == 12


def test_format_keeps_names_of_files_that_have_those_in_memory(tmp_path: Path) -> None:
    model = tiny_architecture("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    opened = load_model(str(tmp_path))
    stored = HubFormat(opened).stored_shapes()
    assert stored == {name: tuple(t.shape) for name, t in stored_tensors(opened).items()}


def test_format_writes_plain_weights_of_model_from_quantized_files(tmp_path: Path) -> None:
    model = tiny_architecture("qwen3_moe")
    model._weight_conversions = [WeightConverter("a", "b", [Fp8Dequantize(None)])]
    model.config.quantization_config = {"quant_method": "fp8"}
    form = HubFormat(model)
    form.write_config(model.config, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert form.stored_shapes() == HubFormat(tiny_architecture("qwen3_moe")).stored_shapes()


def test_shards_have_index_and_at_most_given_size(tmp_path: Path) -> None:
    model = tiny_architecture("mixtral")
    form, tensors, limit = HubFormat(model), stored_tensors(model), 40_000
    stored = (tensor.detach() for _, tensor in form.to_files(tensors.items()))
    write_shards(tmp_path, form.layout(layout_of(tensors)), stored, limit)
    form.write_config(model.config, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    count = len(files)
    assert count > 2 and files[-1].name == f"model-{count:05d}-of-{count:05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = [sum(t.nbytes for t in TensorFiles([file]).values()) for file in files]
    assert max(sizes) <= limit and index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"].keys() == TensorFiles(files).keys()
    model.save_pretrained(tmp_path / "original")
    check_saved(tmp_path, tmp_path / "original", copy.deepcopy(model))
