"""Train engines on a GPU: agreement of FSDP with a single device, and offloading."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.training.engine import TrainEngine
from paceline.training.fsdp import Fsdp
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from tests.contract.test_train_engine import LOSS, random_batch, same_bits, tiny, weights_of
from tests.gpu.test_fused_gpu import batch_of, gradient, relative_error
from tests.gpu.test_native_gpu import MODELS, build
from tests.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(Fsdp, 1, tmp_path_factory.mktemp("ranks"), backend="fsdp")
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_fsdp_rank_trains_like_single_device(ranks: Ranks, dtype: str, tmp_path: Path) -> None:
    settings, batch = TrainSettings(dtype=dtype, gradient_checkpointing=True), random_batch()
    single, sharded = SingleDevice(tiny("qwen3").cuda(), settings), ranks(tiny("qwen3"), settings)
    one, two = (engine.forward_backward(batch, LOSS)["loss"] for engine in (single, sharded))
    tolerance = 1e-4 if dtype == "float32" else 0.05
    assert two == pytest.approx(one, abs=tolerance)
    assert sharded.optimizer_step(1e-4) == pytest.approx(
        single.optimizer_step(1e-4), rel=10 * tolerance
    )
    sharded.save(tmp_path)
    single.load(tmp_path)
    assert same_bits(
        {name: weight.cpu() for name, weight in weights_of(single).items()}, weights_of(sharded)
    )


def fused(model: PreTrainedModel, settings: TrainSettings, **options: Any) -> TrainEngine:
    engine = Fsdp(model, settings, **options)
    assert engine._packed.fused is not None
    return engine


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_passes_give_same_gradients_when_sharded(
    ranks: Ranks, name: str, checkpointing: bool
) -> None:
    settings = TrainSettings(
        dtype="bfloat16", gradient_checkpointing=checkpointing, micro_batch_tokens=500
    )
    batch, model = batch_of(12, 150), build(name)
    sharded = ranks(model, settings, make=fused, temperature=0.8)
    single = SingleDevice(copy.deepcopy(model).cuda(), settings, temperature=0.8)
    before = single.logprobs(batch)
    assert np.abs(before - sharded.logprobs(batch)).max() < 0.05
    one, two = (engine.forward_backward(batch, LOSS)["loss"] for engine in (single, sharded))
    assert two == pytest.approx(one, abs=1e-3)
    wanted, found = gradient(single.model), sharded.gradients()
    assert found.keys() == wanted.keys()
    errors = {key: relative_error(found[key], wanted[key]) for key in wanted}
    assert max(errors.values()) < 0.02, max(errors.items(), key=lambda item: item[1])
    assert sharded.optimizer_step(1e-3) == pytest.approx(single.optimizer_step(1e-3), rel=1e-3)
    after = single.logprobs(batch)
    assert np.abs(after - sharded.logprobs(batch)).mean() < 0.1 * np.abs(after - before).mean(), (
        "the next pass must use the new weights"
    )


def test_offload_frees_device_and_restores_state_unchanged(ranks: Ranks) -> None:
    model = tiny("qwen2").cuda()
    single, sharded = SingleDevice(model, TrainSettings()), ranks(tiny("qwen2"), TrainSettings())
    for engine in (single, sharded):
        engine.forward_backward(random_batch(), LOSS)
        engine.optimizer_step(1e-3)
        engine.forward_backward(random_batch(), LOSS)  # leaves gradients to offload
    views = [model.lm_head.weight.view(-1), model.lm_head.weight[3:5]]
    before, seen = weights_of(single), [view.clone() for view in views]
    held, used = 4 * sum(p.numel() for p in model.parameters()), torch.cuda.memory_allocated()
    offloaded = single.place("host")
    assert offloaded.bytes >= 4 * held and used - torch.cuda.memory_allocated() >= 4 * held
    assert single.place("device").bytes == offloaded.bytes
    assert same_bits(before, weights_of(single)) and all(
        torch.equal(*pair) for pair in zip(views, seen, strict=True)
    )
    assert sharded.place("host").bytes >= 4 * held and sharded.place("device").bytes >= 4 * held
    assert sharded.optimizer_step(1e-3) == pytest.approx(single.optimizer_step(1e-3), rel=1e-3)


def test_shared_parameters_are_not_offloaded() -> None:
    model = tiny("qwen2").cuda()
    engine = SingleDevice(model, TrainSettings())
    engine.forward_backward(random_batch(), LOSS)
    engine.shared_weights(64)
    held = 4 * sum(p.numel() for p in model.parameters())
    assert held <= engine.place("host").bytes < 2 * held
    assert model.lm_head.weight.abs().sum() > 0
    engine.place("device")
    assert engine.optimizer_step(1e-3) > 0
