"""What the planner is told of memory is what engines really hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paceline.train.fsdp import Fsdp
from paceline.train.memory import memory_estimate
from paceline.train.settings import TrainSettings
from paceline.train.single import SingleDevice
from tests.contract.test_train_engine import LOSS, random_batch, tiny
from tests.ranks import Ranks, held_bytes

HELD = ("parameters", "gradients", "optimizer")


def train(engine: Any) -> None:
    engine.forward_backward(random_batch(), LOSS)
    engine.optimizer_step(1e-3)
    engine.forward_backward(random_batch(), LOSS)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3"])
def test_a_single_device_holds_what_was_estimated(name: str) -> None:
    model = tiny(name)
    engine = SingleDevice(model, TrainSettings())
    train(engine)
    estimate = memory_estimate(model.config, TrainSettings())
    assert held_bytes(engine) == {key: estimate[key] for key in HELD}


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (2, 2)])
def test_a_rank_of_fsdp_holds_what_was_estimated(ranks: int, tensor: int, tmp_path: Path) -> None:
    group = Ranks(Fsdp, ranks, tmp_path, backend="fsdp", tensor_parallel=tensor)
    try:
        for name in ("qwen2-tied", "qwen3"):
            engine = group(tiny(name), TrainSettings())
            train(engine)
            settings = TrainSettings(backend="fsdp", tensor_parallel=tensor)
            estimate = memory_estimate(tiny(name).config, settings, ranks)
            assert engine.held() == {key: estimate[key] for key in HELD}
    finally:
        group.close()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_stay_below_their_bound_and_not_far_below(checkpointing: bool) -> None:
    batch = random_batch(rows=40)
    settings = TrainSettings(micro_batch_tokens=120, gradient_checkpointing=checkpointing)
    for name in ("llama", "qwen3"):
        model = tiny(name)
        kept = _kept_bytes(model, lambda model=model: SingleDevice(model, settings).forward_backward(batch, LOSS))  # type: ignore[misc]
        bound = memory_estimate(model.config, settings)["activations"]
        assert bound / 20 < kept < bound


def _kept_bytes(model: PreTrainedModel, work: Callable[[], object]) -> int:
    """Most bytes that autograd kept at a time, weights apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: dict[int, int] = {}
    most = 0

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal most
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            if self.key not in own:
                alive[self.key] = tensor.untyped_storage().nbytes()
            most = max(most, sum(alive.values()))

        def __del__(self) -> None:
            alive.pop(self.key, None)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        work()
    return most
