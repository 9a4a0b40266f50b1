"""The fused forward and backward pass in bfloat16 against transformers in float32."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.algo.loss import PolicyLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import OutOfMemory
from paceline.rollout.native.engine import NativeEngine
from paceline.training.colocated import ColocatedEngine
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Batch, Request, Sampling
from tests.gpu.test_native_gpu import MODELS, VOCABULARY, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LOSS = PolicyLoss(AlgorithmSettings(kl_coef=0.1, entropy_coef=0.01, aggregation="sequence"))


def batch_of(rows: int, longest: int, seed: int = 0) -> Batch:
    """Return rows of different lengths: pairs share a prompt, one row trains a single token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(24, longest, rows).astype(np.int32)
    prompts = rng.integers(3, 20, rows // 2).repeat(2)
    lengths[-1] = prompts[-1] + 1
    tokens = [rng.integers(0, VOCABULARY, n) for n in lengths]
    for row in range(1, rows, 2):
        tokens[row][: prompts[row]] = tokens[row - 1][: prompts[row]]
    mask = np.concatenate([np.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)])

    def normal(scale: float) -> np.ndarray:
        return np.where(mask, rng.standard_normal(len(mask)) * scale, 0).astype(np.float32)

    return Batch(
        tokens=np.concatenate(tokens).astype(np.int32),
        lengths=lengths,
        mask=mask,
        logprobs=normal(0.3) - 7 * mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=np.zeros(rows, np.float32),
        groups=np.arange(rows, dtype=np.int32) // 2,
        advantages=normal(1),
        ref_logprobs=normal(0.3) - 7 * mask.astype(np.float32),
    )


def gradient(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: p.grad.float().cpu().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_equals_transformers_in_float32(name: str, checkpointing: bool) -> None:
    batch, model = batch_of(12, 150), build(name).cuda()
    exact = SingleDevice(copy.deepcopy(model), TrainSettings(), temperature=0.8)
    settings = TrainSettings(
        dtype="bfloat16", gradient_checkpointing=checkpointing, micro_batch_tokens=500
    )
    fused = SingleDevice(model, settings, temperature=0.8)
    assert fused._fused is not None
    assert np.abs(fused.logprobs(batch) - exact.logprobs(batch)).max() < 0.2
    assert np.abs(fused.logprobs(batch) - exact.logprobs(batch)).mean() < 0.02
    metrics, expected = fused.forward_backward(batch, LOSS), exact.forward_backward(batch, LOSS)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=0.02)
    assert metrics["entropy"] == pytest.approx(expected["entropy"], abs=0.02)
    found, wanted = gradient(fused.model), gradient(exact.model)
    assert found.keys() == wanted.keys()
    errors = {key: relative_error(found[key], wanted[key]) for key in wanted}
    assert max(errors.values()) < 0.06, max(errors.items(), key=lambda item: item[1])
    assert fused.optimizer_step(1e-3) == pytest.approx(exact.optimizer_step(1e-3), rel=0.02)


def test_gradient_does_not_depend_on_micro_batch_size() -> None:
    found = []
    for limit in (1, 400, 100000):
        engine = SingleDevice(
            build().cuda(), TrainSettings(dtype="bfloat16", micro_batch_tokens=limit)
        )
        engine.forward_backward(batch_of(12, 150), LOSS)
        found.append(gradient(engine.model))
    for other in found[1:]:
        assert max(relative_error(other[key], found[0][key]) for key in other) < 0.02


def test_engine_on_shared_weights_uses_those_of_last_step() -> None:
    trainer = SingleDevice(build().cuda(), TrainSettings(dtype="bfloat16"))
    engine = NativeEngine(
        trainer.model.config, trainer.shared_weights(256), slots=8, max_length=256
    )
    for version in range(1, 4):
        trainer.forward_backward(batch_of(12, 150, seed=version), LOSS)
        trainer.optimizer_step(1e-2)
        engine.set_version(version)
        engine.submit([Request(f"{version}", (1, 2, 3, 4), version, Sampling(60))])
        done = {}
        while engine.has_work:
            done |= dict(engine.step())
        completion = done[f"{version}"]
        tokens = np.concatenate(([1, 2, 3, 4], completion.tokens)).astype(np.int32)
        mask = np.arange(len(tokens)) >= 4
        zeros = np.zeros(len(tokens), np.float32)
        lengths = np.array([len(tokens)], np.int32)
        batch = Batch(tokens, lengths, mask, zeros, tokens, zeros[:1], tokens[:1])
        again = trainer.logprobs(batch)
        assert np.abs(again[mask] - completion.logprobs).mean() < 0.03


def test_load_restores_bfloat16_copy_of_weights(tmp_path: Path) -> None:
    engines = [
        SingleDevice(build(seed=seed).cuda(), TrainSettings(dtype="bfloat16")) for seed in (0, 1)
    ]
    engines[0].forward_backward(batch_of(12, 150), LOSS)
    engines[0].optimizer_step(1e-2)
    engines[0].save(tmp_path)
    engines[1].load(tmp_path)
    one, two = (engine.logprobs(batch_of(6, 90)) for engine in engines)
    assert np.array_equal(one, two)


def test_offload_includes_bfloat16_copy_and_restores_it() -> None:
    engine, batch = SingleDevice(build().cuda(), TrainSettings(dtype="bfloat16")), batch_of(12, 150)
    engine.forward_backward(batch, LOSS)
    before = engine.logprobs(batch)
    held = sum(p.numel() for p in engine.model.parameters())
    used = torch.cuda.memory_allocated()
    assert engine.place("host").bytes >= 10 * held
    assert used - torch.cuda.memory_allocated() >= 9 * held
    engine.place("device")
    assert np.array_equal(before, engine.logprobs(batch)) and engine.optimizer_step(1e-3) > 0


def test_out_of_memory_error_names_what_holds_memory() -> None:
    engine = SingleDevice(build().cuda(), TrainSettings(dtype="bfloat16", micro_batch_tokens=10**9))
    engine.colocated.append(ColocatedEngine("other engine", lambda: 3 * 2**30, None))
    filler = torch.empty(
        int(torch.cuda.mem_get_info()[0]) - 2**28, dtype=torch.uint8, device="cuda"
    )
    with pytest.raises(
        OutOfMemory,
        match=r"parameters .* GiB.*other engine 3.00 GiB.*activations .* GiB.*micro_batch_tokens",
    ):
        engine.forward_backward(batch_of(4000, 500), LOSS)
    del filler
    torch.cuda.empty_cache()
    engine._optimizer.zero_grad()
    engine.forward_backward(batch_of(12, 150), LOSS)
    assert engine.optimizer_step(1e-3) > 0
