"""Ranks that read their slices from files hold the weights of a model loaded as a whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ModelError
from paceline.model.loading import load_model, model_body
from paceline.training import fsdp
from paceline.training.engine import TrainEngine
from paceline.training.fsdp import Fsdp
from paceline.training.settings import TrainSettings
from tests.architectures import tiny_architecture
from tests.contract.conftest import FsdpRanks
from tests.contract.test_train_engine import LOSS, random_batch, same_bits, tiny, weights_of
from tests.ranks import Ranks

SETTINGS = TrainSettings(micro_batch_tokens=40)


def read_slices(_: Any, settings: TrainSettings, path: str, head: Any = "policy") -> TrainEngine:
    """Open a model; loading it as a whole is an error."""
    whole, fsdp.load_model = fsdp.load_model, _refuse  # type: ignore[assignment]
    try:
        return Fsdp.open(path, settings, 1.0, head)
    finally:
        fsdp.load_model = whole


def open_any(_: Any, settings: TrainSettings, path: str) -> TrainEngine:
    return Fsdp.open(path, settings, 1.0, "policy")


def load_whole(_: Any, settings: TrainSettings, path: str, head: Any = "policy") -> TrainEngine:
    model = load_model(path)
    return Fsdp(model if head == "policy" else model_body(model), settings, 1.0, head)


def _refuse(path: str) -> None:
    raise ModelError(f"{path} was loaded as a whole")


@pytest.fixture(params=["data", "tensor"])
def ranks(request: pytest.FixtureRequest, fsdp_ranks: FsdpRanks) -> Ranks:
    return fsdp_ranks[2].using(tensor_parallel=2) if request.param == "tensor" else fsdp_ranks[2]


@pytest.fixture
def data_ranks(fsdp_ranks: FsdpRanks) -> Ranks:
    return fsdp_ranks[2]


def engines(ranks: Ranks, path: Path, settings: TrainSettings = SETTINGS, **more: Any) -> Any:
    return [
        ranks(None, settings, make=make, path=str(path), **more)  # type: ignore[arg-type]
        for make in (read_slices, load_whole)
    ]


@pytest.mark.parametrize(("name", "dtype"), [("qwen2-tied", "float32"), ("qwen3", "bfloat16")])
def test_slices_train_like_whole_model(ranks: Ranks, name: str, dtype: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path)
    settings, batch = SETTINGS.model_copy(update={"dtype": dtype}), random_batch()
    sliced, whole = engines(ranks, tmp_path, settings)
    assert same_bits(weights_of(sliced), weights_of(whole))
    assert sliced.logprobs(batch).tobytes() == whole.logprobs(batch).tobytes()
    for engine in (sliced, whole):
        engine.forward_backward(batch, LOSS)
    assert sliced.optimizer_step(1e-3) == whole.optimizer_step(1e-3)
    assert same_bits(weights_of(sliced), weights_of(whole))
    assert sliced.logprobs(batch).tobytes() == whole.logprobs(batch).tobytes()


def test_critic_starts_with_same_weights_and_zero_values(ranks: Ranks, tmp_path: Path) -> None:
    tiny("qwen2-tied").save_pretrained(tmp_path)
    sliced, whole = engines(ranks, tmp_path, head="value")
    assert same_bits(weights_of(sliced), weights_of(whole))
    assert not sliced.values(random_batch()).any()


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("gpt2", "policy"),
        ("opt", "value"),
        ("gemma3n_text", "policy"),
        ("granite", "policy"),
        ("deepseek_v3", "policy"),
    ],
)
def test_other_architectures_read_slices(
    data_ranks: Ranks, name: str, head: str, tmp_path: Path
) -> None:
    tiny_architecture(name).save_pretrained(tmp_path)
    sliced, whole = engines(data_ranks, tmp_path, head=head)
    assert same_bits(weights_of(sliced), weights_of(whole))
    batch = random_batch()
    one, two = ((e.logprobs if head == "policy" else e.values)(batch) for e in (sliced, whole))
    assert np.array_equal(one, two)


def test_bfloat16_files_in_shards_are_read_as_float32(data_ranks: Ranks, tmp_path: Path) -> None:
    tiny("qwen3").bfloat16().save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sliced, whole = engines(data_ranks, tmp_path)
    assert all(tensor.dtype == torch.float32 for tensor in weights_of(sliced).values())
    assert same_bits(weights_of(sliced), weights_of(whole))


def test_model_with_other_names_is_loaded_whole(data_ranks: Ranks, tmp_path: Path) -> None:
    """Files of the body alone lack the prefix, which transformers adds."""
    tiny("qwen2-tied").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    body = {key.removeprefix("model."): tensor for key, tensor in load_file(path).items()}
    save_file(body, path, {"format": "pt"})
    engine = data_ranks(None, SETTINGS, make=open_any, path=str(tmp_path))  # type: ignore[arg-type]
    assert same_bits(weights_of(engine), dict(tiny("qwen2-tied").state_dict()))


@pytest.mark.parametrize(
    ("damaged", "message"),
    [("model.norm", "LlamaForCausalLM cannot be trained"), ("layers.1.mlp", "are not finite")],
)
def test_model_with_values_that_are_not_finite_is_rejected(
    data_ranks: Ranks, damaged: str, message: str, tmp_path: Path
) -> None:
    """The last layer is not part of the excerpt that is checked."""
    model = tiny("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if damaged in name:
                parameter.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        data_ranks(None, SETTINGS, make=read_slices, path=str(tmp_path))  # type: ignore[arg-type]
