"""Off-policy weights compared with plain Python, and metrics of mismatch and staleness."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.algo.correction import (
    fresh_tokens,
    importance_weights,
    interpolated,
    named_measures,
    off_policy_measures,
    second_moment_kept,
)
from paceline.algo.settings import AlgorithmSettings

TOKENS = 30
ROWS = torch.arange(TOKENS) // 4
ROW = ROWS.tolist()


def log_weights(seed: int = 0, scale: float = 0.8) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(TOKENS) * scale)


def of_row(values: list[float], i: int) -> list[float]:
    return [value for value, row in zip(values, ROW, strict=True) if row == ROW[i]]


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("truncate", "token"),
        ("truncate", "sequence"),
        ("mask", "token"),
        ("mask", "sequence"),
        ("icepop", "token"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_importance_weights_are_bounded_ratios(kind: str, level: str, seed: int) -> None:
    settings = AlgorithmSettings.model_validate(
        {"correction": kind, "correction_level": level, "correction_range": (0.5, 1.8)}
    )
    log_weight = log_weights(seed)
    found = importance_weights(log_weight, ROWS, settings)
    outside = []
    for i, value in enumerate(log_weight.tolist()):
        ratio = math.exp(sum(of_row(log_weight.tolist(), i)) if level == "sequence" else value)
        outside.append(not 0.5 <= ratio <= 1.8)
        expected = (
            min(max(ratio, 0.5), 1.8) if kind == "truncate" else 0.0 if outside[-1] else ratio
        )
        assert float(found.values[i]) == pytest.approx(expected)
    assert 0 < sum(outside) < TOKENS
    touched, untouched = (
        (found.truncated, found.masked) if kind == "truncate" else (found.masked, found.truncated)
    )
    assert touched.tolist() == outside and not untouched.any()


@pytest.mark.parametrize("threshold", [0.04, 0.3, 100.0])
def test_m2po_masks_largest_log_weights_until_mean_square_fits(threshold: float) -> None:
    log_weight = log_weights().tolist()
    kept = list(range(TOKENS))
    while kept and sum(log_weight[i] ** 2 for i in kept) / len(kept) > threshold:
        kept.remove(max(kept, key=lambda i: log_weight[i] ** 2))
    found = second_moment_kept(torch.tensor(log_weight, dtype=torch.float64), threshold)
    assert found.nonzero().flatten().tolist() == kept
    weights = importance_weights(
        torch.tensor(log_weight), ROWS, AlgorithmSettings(correction="m2po", m2_threshold=threshold)
    )
    assert weights.values.tolist() == pytest.approx(
        [math.exp(x) if i in kept else 0.0 for i, x in enumerate(log_weight)]
    )


def test_reject_range_masks_whole_completions_by_mean_ratio() -> None:
    log_weight = log_weights(1)
    found = importance_weights(
        log_weight, ROWS, AlgorithmSettings(correction="none", reject_range=(0.9, 1.2))
    )
    means = [math.exp(sum(row := of_row(log_weight.tolist(), i)) / len(row)) for i in range(TOKENS)]
    assert found.values.tolist() == [1.0 if 0.9 <= mean <= 1.2 else 0.0 for mean in means]
    assert 0 < found.masked.sum() < TOKENS


def test_importance_weights_are_finite_when_ratios_overflow() -> None:
    log_weight = torch.tensor([500.0, -500.0, 0.0])
    rows = torch.tensor([0, 1, 2])
    for correction in ("truncate", "mask", "m2po"):
        settings = AlgorithmSettings.model_validate({"correction": correction})
        assert importance_weights(log_weight, rows, settings).values.isfinite().all()


def test_interpolated_moves_from_sampler_to_current_with_staleness() -> None:
    current, sampler = torch.full((4,), -1.0, requires_grad=True), torch.full((4,), -3.0)
    found = interpolated(current, sampler, versions=torch.tensor([7, 6, 5, 0]), step=7)
    assert found.tolist() == pytest.approx([-3, -3 + 2 * 1 / 2, -3 + 2 * 2 / 3, -3 + 2 * 7 / 8])
    assert not found.requires_grad


def measured(log_ratio: list[float], fresh: list[bool]) -> dict[str, float]:
    sums, maxima = off_policy_measures(torch.tensor(log_ratio), torch.tensor(fresh))
    means = {name: float(value) / len(fresh) for name, value in sums.items()}
    return named_measures(means | {name: float(value) for name, value in maxima.items()})


def test_measures_separate_mismatch_from_staleness() -> None:
    found = measured([0.01, -0.02, 0.5, -1.0], [True, True, False, False])
    assert found == pytest.approx(
        {
            "stale_fraction": 0.5,
            "logprob_diff_mean": 0.015,
            "logprob_diff_max": 0.02,
            "mismatch_ratio_mean": (math.exp(0.01) + math.exp(-0.02)) / 2,
            "mismatch_ratio_max": math.exp(0.01),
            "mismatch_kl": sum(math.exp(x) - 1 - x for x in (0.01, -0.02)) / 2,
            "staleness_ratio_mean": (math.exp(0.5) + math.exp(-1)) / 2,
            "staleness_ratio_max": math.exp(0.5),
            "mismatch_outlier_fraction": 0.0,
            "staleness_diff_mean": 0.75,
            "staleness_kl": sum(math.exp(x) - 1 - x for x in (0.5, -1.0)) / 2,
        },
        rel=1e-3,
    )


def test_fresh_tokens_exclude_completions_with_older_tokens() -> None:
    rows, versions = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([7, 7, 6, 7, 6, 6])
    assert fresh_tokens(versions, rows, step=7).tolist() == [True, True, False, False, False, False]


def test_measures_leave_out_kind_without_tokens() -> None:
    assert not any(name.startswith("staleness") for name in measured([0.1, 0.2], [True, True]))
    assert not any(
        name.startswith(("mismatch", "logprob_diff"))
        for name in measured([0.1, 0.2], [False, False])
    )
