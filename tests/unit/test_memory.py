"""Memory estimates match what an engine holds (ranks: tests/contract/test_train_ranks.py)."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel

from paceline.model.known_shapes import known_shape
from paceline.training.memory import memory_estimate, parameter_count
from paceline.training.settings import LoraSettings, TrainSettings
from paceline.training.single import SingleDevice
from tests.contract.test_train_engine import LOSS, random_batch, tiny
from tests.ranks import held_bytes


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3"])
def test_single_device_holds_estimated_memory(name: str) -> None:
    model = tiny(name)
    engine = SingleDevice(model, TrainSettings())
    engine.forward_backward(random_batch(), LOSS)
    engine.optimizer_step(1e-3)
    engine.forward_backward(random_batch(), LOSS)
    estimate = memory_estimate(model.config, TrainSettings())
    assert held_bytes(engine) == {
        key: estimate[key] for key in ("parameters", "gradients", "optimizer")
    }


def test_activations_stay_below_estimate() -> None:
    batch = random_batch(rows=40)
    for name in ("llama", "qwen3"):
        bounds = []
        for checkpointing in (False, True):
            settings = TrainSettings(micro_batch_tokens=120, gradient_checkpointing=checkpointing)
            model = tiny(name)
            engine = SingleDevice(model, settings)
            bounds.append(memory_estimate(model.config, settings)["activations"])
            work = partial(engine.forward_backward, batch, LOSS)
            assert _saved_bytes(model, work) < bounds[-1]
        assert bounds[1] < bounds[0]


@pytest.mark.parametrize(
    ("shape", "tokens", "checkpointing", "peak"),
    [
        ("0.5b", 32768, False, 37.6),
        ("0.5b", 8192, False, 17.5),
        ("0.5b", 32768, True, 14.7),
        ("1.5b", 16384, False, 53.7),
    ],
)
def test_estimate_on_gpu_is_close_to_measured_peak(
    shape: str, tokens: int, checkpointing: bool, peak: float
) -> None:
    """The peaks in GiB are those of benchmarks/results/gpu_train.json."""
    settings = TrainSettings(
        dtype="bfloat16", micro_batch_tokens=tokens, gradient_checkpointing=checkpointing
    )
    estimate = sum(memory_estimate(known_shape(shape), settings, gpu=True).values()) / 2**30
    assert peak < estimate < 1.25 * peak


SHAPE = {"hidden_size": 320, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (MistralConfig(sliding_window=4096, num_attention_heads=5, **SHAPE), None),
        (LlamaConfig(num_attention_heads=4, **SHAPE), None),  # heads of 80
        (LlamaConfig(num_attention_heads=5, **SHAPE), LoraSettings()),
    ],
    ids=["window", "heads", "adapters"],
)
def test_gpu_estimate_is_that_of_module_when_module_trains(
    config: PretrainedConfig, lora: LoraSettings | None
) -> None:
    module = memory_estimate(config, TrainSettings(dtype="bfloat16", lora=lora), gpu=True)
    fused = memory_estimate(
        LlamaConfig(num_attention_heads=5, **SHAPE), TrainSettings(dtype="bfloat16"), gpu=True
    )
    assert module["parameters"] == 4 * parameter_count(config)  # no bfloat16 copy
    assert module["activations"] > fused["activations"]


def _saved_bytes(model: PreTrainedModel, work: Callable[[], object]) -> int:
    """Return the peak bytes of tensors that autograd saved, except weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: dict[int, int] = {}
    peak = 0

    class SavedTensor:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal peak
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            if self.key not in weights:
                alive[self.key] = tensor.untyped_storage().nbytes()
            peak = max(peak, sum(alive.values()))

        def __del__(self) -> None:
            alive.pop(self.key, None)

    with torch.autograd.graph.saved_tensors_hooks(SavedTensor, lambda saved: saved.tensor):
        work()
    return peak
