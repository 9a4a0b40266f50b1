"""What the planner is told of memory is what an engine really holds. (Ranks: tests/contract/test_train_ranks.py.)"""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from paceline.train.memory import memory_estimate
from paceline.train.settings import TrainSettings
from paceline.train.single import SingleDevice
from tests.contract.test_train_engine import LOSS, random_batch, tiny
from tests.ranks import held_bytes


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3"])
def test_a_single_device_holds_what_was_estimated(name: str) -> None:
    model = tiny(name)
    engine = SingleDevice(model, TrainSettings())
    engine.forward_backward(random_batch(), LOSS)
    engine.optimizer_step(1e-3)
    engine.forward_backward(random_batch(), LOSS)
    estimate = memory_estimate(model.config, TrainSettings())
    assert held_bytes(engine) == {
        key: estimate[key] for key in ("parameters", "gradients", "optimizer")
    }


def test_activations_stay_below_their_bound() -> None:
    batch = random_batch(rows=40)
    for name in ("llama", "qwen3"):
        bounds = []
        for checkpointing in (False, True):
            settings, model = (
                TrainSettings(micro_batch_tokens=120, gradient_checkpointing=checkpointing),
                tiny(name),
            )
            engine = SingleDevice(model, settings)
            bounds.append(memory_estimate(model.config, settings)["activations"])
            assert (
                _kept_bytes(model, lambda engine=engine: engine.forward_backward(batch, LOSS))
                < bounds[-1]
            )  # type: ignore[misc]
        assert bounds[1] < bounds[0]


def _kept_bytes(model: PreTrainedModel, work: Callable[[], object]) -> int:
    """Most bytes that autograd kept at a time, weights apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: dict[int, int] = {}
    most = 0

    class SavedActivations:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal most
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            if self.key not in own:
                alive[self.key] = tensor.untyped_storage().nbytes()
            most = max(most, sum(alive.values()))

        def __del__(self) -> None:
            alive.pop(self.key, None)

    with torch.autograd.graph.saved_tensors_hooks(SavedActivations, lambda kept: kept.tensor):
        work()
    return most
