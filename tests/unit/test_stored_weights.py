"""Models that can be read slice by slice, and files that hold them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.model import tensor_file
from paceline.model.engine_weights import engine_weights
from paceline.model.loading import load_config, load_model
from paceline.model.stored_weights import load_onto, open_empty, open_stored
from paceline.model.tensor_file import TensorFiles, model_shards
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from tests.contract.test_train_engine import tiny


def test_model_has_buffers_but_no_memory_for_parameters(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    opened, whole = open_stored(str(tmp_path)), load_model(str(tmp_path))
    assert opened is not None
    model, _ = opened
    assert all(parameter.is_meta for parameter in model.parameters())
    for (name, buffer), (_, expected) in zip(
        model.named_buffers(), whole.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, expected), name


def test_models_are_loaded_by_several_threads_at_once(tmp_path: Path) -> None:
    tiny("qwen2-tied").save_pretrained(tmp_path)
    kinds = ["float32", "bfloat16"] * 12
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda dtype: load_model(str(tmp_path), dtype), kinds))
    assert [str(model.dtype) for model in loaded] == [f"torch.{dtype}" for dtype in kinds]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_empty_model_is_filled_like_loaded_model(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path)
    empty = open_empty(str(tmp_path), "bfloat16", torch.device("cpu"))
    whole = load_model(str(tmp_path), "bfloat16")
    assert empty is not None and empty.dtype == whole.dtype
    found = engine_weights(empty, share=True, max_length=64)
    found.load(iter(load_model(str(tmp_path)).state_dict().items()))
    expected = engine_weights(whole, share=False, max_length=64)
    assert found.named.keys() == expected.named.keys()
    assert all(torch.equal(found.named[key], expected.named[key]) for key in expected.named)


def with_second_value_of_tied_weight(folder: Path) -> Tensor:
    """Write a model whose output layer differs from its embedding, although its config ties them.

    Return the output layer.
    """
    tiny("qwen2-tied").save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path, {"format": "pt"})
    return tensors["lm_head.weight"]


def test_model_with_two_values_for_tied_weight_is_not_read_by_slices(tmp_path: Path) -> None:
    with_second_value_of_tied_weight(tmp_path)
    assert open_stored(str(tmp_path)) is None


def test_model_with_two_values_for_tied_weight_is_saved_as_untied(tmp_path: Path) -> None:
    output = with_second_value_of_tied_weight(tmp_path)
    engine = SingleDevice(load_onto(str(tmp_path), torch.device("cpu")), TrainSettings())
    engine.save(tmp_path)
    assert not load_config(str(tmp_path / "actor")).tie_word_embeddings
    saved = load_file(tmp_path / "actor" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], output)
    torch.testing.assert_close(saved["model.embed_tokens.weight"], output - 1)


def test_damaged_files_are_left_to_loader_that_reports_them(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert open_stored(str(tmp_path)) is None


def test_index_selects_files_of_model(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    shards = model_shards(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert len(shards) > 1 and model_shards(tmp_path) == shards


def test_tensors_stay_readable_when_their_file_is_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "MAX_MAPPED_BYTES", 0)
    tensors = {name: torch.randn(4, 3) for name in "abc"}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles.of_model(tmp_path)
    found = {name: files.read(name, (slice(1, 3), slice(0, 3))) for name in files}
    assert all(torch.equal(found[name], tensors[name][1:3]) for name in tensors)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_model_is_loaded_onto_device_as_by_transformers(name: str, tmp_path: Path) -> None:
    tiny(name).to(torch.bfloat16).save_pretrained(tmp_path)
    found, expected = load_onto(str(tmp_path), torch.device("cpu")), load_model(str(tmp_path))
    assert all(parameter.requires_grad for parameter in found.parameters())
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
