"""FSDP with the explicit passes gives the results of a single device.

Plain torch replaces the GPU kernels (on a GPU: tests/gpu/test_train_gpu.py).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.algo.loss import TokenOutputs
from paceline.model.packing import MicroBatch, select_rows
from paceline.training import decoder
from paceline.training.fsdp import Fsdp
from paceline.training.settings import TrainSettings
from paceline.training.sharded_decoder import ShardedDecoder
from paceline.training.single import SingleDevice
from tests.contract.conftest import FsdpRanks
from tests.contract.test_train_engine import (
    LOSS,
    MODELS,
    TEMPERATURE,
    gradients,
    random_batch,
    same_bits,
    tiny,
    weights_of,
)
from tests.ranks import Ranks
from tests.unit.test_train_decoder import torch_passes, with_varlen


class OnCpu(ShardedDecoder):
    def __call__(self, micro: MicroBatch) -> TokenOutputs:
        return super().__call__(with_varlen(micro))


class FusedFsdp(Fsdp):
    def _fused(self, model: PreTrainedModel, temperature: float) -> ShardedDecoder:
        decoder.add_matmul = add_matmul
        return OnCpu(
            model, torch_passes(model.config, self._settings.gradient_checkpointing), temperature
        )


def add_matmul(to: Tensor, a: Tensor, b: Tensor) -> None:
    """Replace a matmul that torch lacks on a CPU: bfloat16 inputs with a float32 result."""
    to += a.to(to.dtype) @ b.to(to.dtype)


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest, fsdp_ranks: FsdpRanks) -> Ranks:
    return fsdp_ranks[request.param].using(FusedFsdp)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharded_decoder_matches_single_device(
    ranks: Ranks, name: str, checkpointing: bool
) -> None:
    batch = random_batch()
    settings = TrainSettings(micro_batch_tokens=40, gradient_checkpointing=checkpointing)
    single, sharded = (
        build(tiny(name), settings, temperature=TEMPERATURE) for build in (SingleDevice, ranks)
    )
    assert np.abs(single.logprobs(batch) - sharded.logprobs(batch)).max() < 1e-5
    for _ in range(2):  # gradients of two calls accumulate
        one, two = (engine.forward_backward(batch, LOSS) for engine in (single, sharded))
        assert two == pytest.approx(one, abs=1e-5)
    expected, found = gradients(single), gradients(sharded)
    assert found.keys() == expected.keys()
    assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < 1e-5
    assert sharded.optimizer_step(1e-4) == pytest.approx(single.optimizer_step(1e-4), abs=1e-5)
    before, after = weights_of(single), weights_of(sharded)
    assert max(float((after[key] - before[key]).abs().max()) for key in before) < 1e-5
    assert np.abs(single.logprobs(batch) - sharded.logprobs(batch)).max() < 1e-5, (
        "the next pass must use the new weights"
    )


def open_fused(_: Any, settings: TrainSettings, path: str) -> Fsdp:
    return FusedFsdp.open(path, settings, TEMPERATURE, "policy")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_are_checked_with_an_excerpt_when_slices_are_read(
    ranks: Ranks, dtype: str, tmp_path: Path
) -> None:
    tiny("qwen2-tied").save_pretrained(tmp_path)
    settings, batch = TrainSettings(dtype=dtype), random_batch()
    opened = ranks(None, settings, make=open_fused, path=str(tmp_path))  # type: ignore[arg-type]
    expected = ranks(tiny("qwen2-tied"), settings, temperature=TEMPERATURE)
    assert np.abs(opened.logprobs(batch) - expected.logprobs(batch)).max() < 1e-5


def test_step_matches_single_device_when_rank_has_no_rows(ranks: Ranks) -> None:
    whole = random_batch()
    batch = select_rows(whole, np.array([int(whole.lengths.argmax())]))
    single, sharded = (build(tiny("qwen3"), TrainSettings()) for build in (SingleDevice, ranks))
    one, two = (engine.forward_backward(batch, LOSS)["loss"] for engine in (single, sharded))
    assert two == pytest.approx(one, abs=1e-5)
    assert sharded.optimizer_step(1e-4) == pytest.approx(single.optimizer_step(1e-4), abs=1e-5)


def test_gradients_stay_float32_when_matmuls_are_bfloat16(ranks: Ranks) -> None:
    """Ranks and passes accumulate in float32: only rounding inside a pass depends on its size."""
    found: list[dict[str, Tensor]] = []
    for limit in (1, 4096):
        engine: Any = ranks(
            tiny("qwen2-tied"), TrainSettings(dtype="bfloat16", micro_batch_tokens=limit)
        )
        engine.forward_backward(random_batch(), LOSS)
        found.append(gradients(engine))
    assert all(tensor.dtype == torch.float32 for tensor in found[0].values())
    assert not any(
        torch.equal(tensor, tensor.bfloat16().float())
        for tensor in found[1].values()
        if tensor.ndim > 1
    )
    exact = SingleDevice(tiny("qwen2-tied"), TrainSettings())
    exact.forward_backward(random_batch(), LOSS)
    for key, expected in gradients(exact).items():
        for each in found:
            assert float((each[key] - expected).norm() / expected.norm()) < 0.06, key
    assert not same_bits(*found)
