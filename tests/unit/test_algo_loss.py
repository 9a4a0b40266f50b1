"""Losses compared with their formulas in plain Python, gradients with finite differences."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.algo.loss import PolicyLoss, TokenData, TokenOutputs, ValueLoss, token_weights
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import ConfigError
from paceline.types import Batch
from tests.ratios import TOKENS, tensors


def data(t: dict[str, Tensor]) -> TokenData:
    rows, versions = torch.zeros(TOKENS, dtype=torch.long), torch.zeros(TOKENS, dtype=torch.int32)
    return TokenData(
        rows,
        t["weights"],
        t["old"],
        versions,
        t["advantages"],
        t["returns"],
        t["old_values"],
        t["ref"],
    )


def plain_policy_loss(t: dict[str, Tensor], s: AlgorithmSettings, kl_coef: float) -> float:
    total = 0.0
    for i in range(TOKENS):
        ratio, advantage = math.exp(t["new"][i] - t["old"][i]), float(t["advantages"][i])
        objective = min(
            ratio * advantage, min(max(ratio, 1 - s.clip_low), 1 + s.clip_high) * advantage
        )
        d = float(t["new"][i] - t["ref"][i])
        to_reference = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[s.kl_estimator]
        total += float(t["weights"][i]) * (
            -objective + kl_coef * to_reference - s.entropy_coef * float(t["entropy"][i])
        )
    return total


@pytest.mark.parametrize(
    "settings",
    [
        AlgorithmSettings(),
        AlgorithmSettings(kl_coef=0.3, entropy_coef=0.05),
        AlgorithmSettings(kl_coef=0.3, kl_estimator="k2"),
    ],
)
def test_policy_loss_is_weighted_objective_plus_kl_minus_entropy(
    settings: AlgorithmSettings,
) -> None:
    t = tensors()
    outputs = TokenOutputs(logprobs=t["new"], entropy=t["entropy"])
    assert float(PolicyLoss(settings)(outputs, data(t)).loss) == pytest.approx(
        plain_policy_loss(t, settings, settings.kl_coef), abs=1e-10
    )
    adapted = PolicyLoss(settings, kl_coef=0.7)(outputs, data(t)).loss
    assert float(adapted) == pytest.approx(plain_policy_loss(t, settings, 0.7), abs=1e-10)

    def loss(new: Tensor, entropy: Tensor) -> Tensor:
        return PolicyLoss(settings)(TokenOutputs(logprobs=new, entropy=entropy), data(t)).loss

    assert torch.autograd.gradcheck(
        loss, (t["new"].requires_grad_(), t["entropy"].requires_grad_())
    )


def test_policy_loss_only_measures_kl_when_placed_in_reward() -> None:
    t = tensors()
    settings = AlgorithmSettings(kl_coef=0.3, kl_placement="reward")
    terms = PolicyLoss(settings)(TokenOutputs(logprobs=t["new"], entropy=t["entropy"]), data(t))
    assert float(terms.loss) == pytest.approx(plain_policy_loss(t, settings, 0.0), abs=1e-10)
    assert float(terms.sums["kl_reference"]) == pytest.approx(
        sum(math.exp(-d) - 1 + d for d in (t["new"] - t["ref"]).tolist())
    )


@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
def test_decoupled_loss_weights_by_one_ratio_clips_by_other(
    proximal: str,
) -> None:
    t, step = tensors(), 3
    settings = AlgorithmSettings.model_validate(
        {"proximal": proximal, "correction_range": (0.0, 1.5), "clip_low": 0.05, "clip_high": 0.1}
    )
    versions = torch.arange(TOKENS, dtype=torch.int32) % 4
    terms = PolicyLoss(settings, step)(
        TokenOutputs(t["new"], t["entropy"]), replace(data(t), versions=versions)
    )
    total = 0.0
    for i in range(TOKENS):
        staleness, new, old = step - int(versions[i]), float(t["new"][i]), float(t["old"][i])
        anchor = (
            new if proximal == "recomputed" else old + staleness / (staleness + 1) * (new - old)
        )
        ratio, advantage = (
            math.exp(new - anchor),
            float(t["advantages"][i]) * min(math.exp(anchor - old), 1.5),
        )
        total -= float(t["weights"][i]) * min(
            ratio * advantage, min(max(ratio, 0.95), 1.1) * advantage
        )
    assert float(terms.loss) == pytest.approx(total, abs=1e-10)
    assert 0 < terms.sums["truncated_fraction"] < TOKENS and terms.sums["masked_fraction"] == 0


def test_diagnostics_match_their_definitions() -> None:
    t = tensors()
    given = replace(data(t), rows=torch.arange(TOKENS) % 2, versions=torch.arange(TOKENS) % 2)
    terms = PolicyLoss(AlgorithmSettings(clip_high=0.3), step=1)(
        TokenOutputs(logprobs=t["new"], entropy=t["entropy"]), given
    )
    log_ratio = [float(a - b) for a, b in zip(t["new"], t["old"], strict=True)]
    ratio = [math.exp(x) for x in log_ratio]
    cut = [
        (r > 1.3 and a > 0) or (r < 0.8 and a < 0)
        for r, a in zip(ratio, t["advantages"], strict=True)
    ]
    assert 0 < sum(cut) < TOKENS
    expected = {
        "entropy": float(t["entropy"].sum()),
        "kl": sum(math.exp(x) - 1 - x for x in log_ratio),
        "ratio_mean": sum(ratio),
        "clip_fraction": float(sum(cut)),
        "mismatch_fraction": TOKENS / 2,
        "mismatch_ratio_mean": sum(ratio[1::2]),
        "staleness_ratio_mean": sum(ratio[::2]),
        "logprob_diff_mean": sum(abs(x) for x in log_ratio[1::2]),
    }
    assert {name: float(terms.sums[name]) for name in expected} == pytest.approx(expected)
    assert float(terms.maxima["ratio_max"]) == pytest.approx(max(ratio))
    assert float(terms.maxima["logprob_diff_max"]) == pytest.approx(
        max(abs(x) for x in log_ratio[1::2])
    )


def test_diagnostics_are_finite_when_ratios_exceed_float32() -> None:
    t = {name: value.float() for name, value in tensors().items()}
    new = t["old"] + torch.where(torch.arange(TOKENS) % 2 == 0, 100.0, -100.0)
    for step in (0, 1):  # fresh tokens, then stale ones
        terms = PolicyLoss(AlgorithmSettings(kl_coef=0.1), step)(
            TokenOutputs(logprobs=new, entropy=t["entropy"]), data(t)
        )
        measures = terms.sums | terms.maxima | {"loss": terms.loss}
        assert [name for name, value in measures.items() if not value.isfinite()] == []


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_value_loss_is_larger_of_unclipped_clipped_error(clip: float | None) -> None:
    t = tensors()
    terms = ValueLoss(clip)(TokenOutputs(values=t["values"]), data(t))
    total, errors = 0.0, 0.0
    for value, old, target, weight in zip(
        t["values"], t["old_values"], t["returns"], t["weights"], strict=True
    ):
        worst = (value - target) ** 2
        errors += float(worst)
        if clip is not None:
            worst = max(worst, (min(max(value, old - clip), old + clip) - target) ** 2)
        total += float(weight * 0.5 * worst)
    assert float(terms.loss) == pytest.approx(total, abs=1e-10)
    assert float(terms.sums["value_error"]) == pytest.approx(errors)
    assert torch.autograd.gradcheck(
        lambda v: ValueLoss(clip)(TokenOutputs(values=v), data(t)).loss,
        (t["values"].requires_grad_(),),
    )


def test_policy_loss_fails_when_reference_logprobs_are_missing() -> None:
    t = tensors()
    with pytest.raises(ConfigError, match="reference"):
        PolicyLoss(AlgorithmSettings(kl_coef=0.1))(
            TokenOutputs(logprobs=t["new"], entropy=t["entropy"]),
            replace(data(t), ref_logprobs=None),
        )


def small_batch() -> Batch:
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 0], np.bool_)
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    lengths = np.array([3, 5, 2], np.int32)  # the last row has no trained token
    return Batch(
        np.arange(10, dtype=np.int32),
        lengths,
        mask,
        logprobs,
        np.zeros(10, np.int32),
        np.zeros(3, np.float32),
        lengths,
    )


def test_token_weights_match_aggregation() -> None:
    batch = small_batch()
    assert token_weights(batch, "token")[batch.mask].tolist() == pytest.approx([1 / 5] * 5)
    assert token_weights(batch, "sequence")[batch.mask].tolist() == pytest.approx(
        [1 / 4] * 2 + [1 / 6] * 3
    )
    assert token_weights(batch, "constant", 10)[batch.mask].tolist() == pytest.approx([1 / 20] * 5)
    assert not token_weights(batch, "token")[~batch.mask].any()


def test_constant_aggregation_divides_by_max_length_by_default() -> None:
    batch, settings = small_batch(), AlgorithmSettings(name="dr_grpo")
    assert PolicyLoss(settings, max_length=20).weights(batch)[batch.mask].tolist() == pytest.approx(
        [1 / 40] * 5
    )
    explicit = AlgorithmSettings(name="dr_grpo", constant_length=5)
    assert PolicyLoss(explicit, max_length=20).weights(batch)[batch.mask].tolist() == pytest.approx(
        [1 / 10] * 5
    )
    with pytest.raises(ConfigError, match="constant_length"):
        PolicyLoss(settings).weights(batch)
