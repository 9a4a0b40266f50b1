"""Losses against a plain restatement of their formulas, and their gradients against finite differences."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from paceline.algo.loss import PolicyLoss, TokenData, TokenOutputs, ValueLoss, clipped_objective, token_weights, truncate_importance
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import ConfigError
from paceline.types import Batch

TOKENS = 40


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Ratios from far below to far above every clip, advantages of both signs."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(TOKENS, generator=g, dtype=torch.float64) * scale

    old = -normal(1).abs() - 0.5
    return {
        "old": old,
        "new": old + normal(0.7),
        "advantages": normal(1),
        "entropy": normal(1).abs(),
        "ref": old + normal(0.3),
        "values": normal(1),
        "old_values": normal(1),
        "returns": normal(1),
        "weights": normal(1).abs(),
    }


def data(t: dict[str, Tensor]) -> TokenData:
    rows, versions = torch.zeros(TOKENS, dtype=torch.long), torch.zeros(TOKENS, dtype=torch.int32)
    return TokenData(rows, t["weights"], t["old"], versions, t["advantages"], t["returns"], t["old_values"], t["ref"])


def plain_policy_loss(t: dict[str, Tensor], s: AlgorithmSettings) -> float:
    total = 0.0
    for i in range(TOKENS):
        ratio, advantage = math.exp(t["new"][i] - t["old"][i]), float(t["advantages"][i])
        objective = min(ratio * advantage, min(max(ratio, 1 - s.clip_low), 1 + s.clip_high) * advantage)
        if s.dual_clip is not None and advantage < 0:
            objective = max(objective, s.dual_clip * advantage)
        to_reference = math.exp(t["ref"][i] - t["new"][i]) - 1 - float(t["ref"][i] - t["new"][i])
        total += float(t["weights"][i]) * (-objective + s.kl_coef * to_reference - s.entropy_coef * float(t["entropy"][i]))
    return total


@pytest.mark.parametrize(
    "settings",
    [
        AlgorithmSettings(),
        AlgorithmSettings(clip_low=0.2, clip_high=0.28),
        AlgorithmSettings(dual_clip=3.0),
        AlgorithmSettings(dual_clip=1.5, kl_coef=0.3, entropy_coef=0.05),
    ],
)
def test_the_policy_loss_is_the_clipped_objective_token_by_token(settings: AlgorithmSettings) -> None:
    t = tensors()
    terms = PolicyLoss(settings)(TokenOutputs(logprobs=t["new"], entropy=t["entropy"]), data(t))
    assert float(terms.loss) == pytest.approx(plain_policy_loss(t, settings), abs=1e-10)

    def loss(new: Tensor, entropy: Tensor) -> Tensor:
        return PolicyLoss(settings)(TokenOutputs(logprobs=new, entropy=entropy), data(t)).loss

    assert torch.autograd.gradcheck(loss, (t["new"].requires_grad_(), t["entropy"].requires_grad_()))


def test_diagnostics_are_what_they_are_called() -> None:
    t = tensors()
    terms = PolicyLoss(AlgorithmSettings(clip_low=0.2, clip_high=0.3))(TokenOutputs(logprobs=t["new"], entropy=t["entropy"]), data(t))
    log_ratio = [float(a - b) for a, b in zip(t["new"], t["old"], strict=True)]
    ratio = [math.exp(x) for x in log_ratio]
    cut = [(r > 1.3 and a > 0) or (r < 0.8 and a < 0) for r, a in zip(ratio, t["advantages"], strict=True)]
    assert 0 < sum(cut) < TOKENS
    expected = {
        "entropy": float(t["entropy"].sum()),
        "kl": sum(math.exp(x) - 1 - x for x in log_ratio),
        "ratio_mean": sum(ratio),
        "clip_share": float(sum(cut)),
        "logprob_gap_mean": sum(abs(x) for x in log_ratio),
    }
    assert {name: float(value) for name, value in terms.sums.items()} == pytest.approx(expected)
    assert {name: float(value) for name, value in terms.maxima.items()} == pytest.approx(
        {"ratio_max": max(ratio), "logprob_gap_max": max(abs(x) for x in log_ratio)}
    )


def test_a_clipped_token_has_no_gradient() -> None:
    log_ratio = torch.tensor([1.0, -1.0, 0.0], requires_grad=True)
    loss, cut = clipped_objective(log_ratio, torch.tensor([1.0, -1.0, 1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert cut.tolist() == [True, True, False]
    assert log_ratio.grad is not None and log_ratio.grad.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_the_value_loss_is_the_worse_of_the_free_and_the_clipped_error(clip: float | None) -> None:
    t = tensors()
    terms = ValueLoss(clip)(TokenOutputs(values=t["values"]), data(t))
    total, errors = 0.0, 0.0
    for value, old, target, weight in zip(t["values"], t["old_values"], t["returns"], t["weights"], strict=True):
        worst = (value - target) ** 2
        errors += float(worst)
        if clip is not None:
            worst = max(worst, (min(max(value, old - clip), old + clip) - target) ** 2)
        total += float(weight * 0.5 * worst)
    assert float(terms.loss) == pytest.approx(total, abs=1e-10)
    assert float(terms.sums["value_error"]) == pytest.approx(errors)
    assert torch.autograd.gradcheck(lambda v: ValueLoss(clip)(TokenOutputs(values=v), data(t)).loss, (t["values"].requires_grad_(),))


def test_kl_to_a_reference_that_is_not_there_is_refused() -> None:
    t = tensors()
    with pytest.raises(ConfigError, match="reference"):
        PolicyLoss(AlgorithmSettings(kl_coef=0.1))(
            TokenOutputs(logprobs=t["new"], entropy=t["entropy"]), replace(data(t), ref_logprobs=None)
        )


def small_batch() -> Batch:
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 0], np.bool_)
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    lengths = np.array([3, 5, 2], np.int32)  # the last row has nothing to train on
    return Batch(np.arange(10, dtype=np.int32), lengths, mask, logprobs, np.zeros(10, np.int32), np.zeros(3, np.float32), lengths)


def test_token_weights_say_what_each_aggregation_divides_by() -> None:
    batch = small_batch()
    assert token_weights(batch, "token")[batch.mask].tolist() == pytest.approx([1 / 5] * 5)
    assert token_weights(batch, "sequence")[batch.mask].tolist() == pytest.approx([1 / 4] * 2 + [1 / 6] * 3)
    assert token_weights(batch, "constant", 10)[batch.mask].tolist() == pytest.approx([1 / 20] * 5)
    assert not token_weights(batch, "token")[~batch.mask].any()


def test_constant_aggregation_and_its_length_come_together() -> None:
    with pytest.raises(ValidationError, match="constant_length"):
        AlgorithmSettings(aggregation="constant")
    with pytest.raises(ValidationError, match="constant_length"):
        AlgorithmSettings(constant_length=8)


def test_importance_is_truncated_token_by_token() -> None:
    batch = replace(small_batch(), advantages=np.full(10, -2.0, np.float32))
    proximal = np.array([0, -0.5, -1.5, 0, 0, -1, 0.5, -3, 0, 0], np.float32)
    moved = truncate_importance(batch, proximal, cap=2.0)
    assert moved.logprobs is proximal and moved.advantages is not None
    expected = [-2 * min(math.exp(p + 1), 2.0) for p in (-0.5, -1.5, -1, 0.5, -3)]
    assert moved.advantages[batch.mask].tolist() == pytest.approx(expected, rel=1e-6)
