"""KL estimators: values, gradients and the adapted coefficient."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from paceline.algo.kl import K3_TANGENT, adapted, kl_estimate, kl_loss
from paceline.algo.settings import Estimator

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def distributions() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)


def gradient(value: Tensor, logits: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(value, logits)
    return found.tolist()


def test_kl_estimates_match_schulmans_formulas() -> None:
    new, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -0.5, -0.5])
    plain = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
    for estimator in ESTIMATORS:
        expected = [plain[estimator](float(a - b)) for a, b in zip(new, ref, strict=True)]
        assert kl_estimate(new, ref, estimator).tolist() == pytest.approx(expected)
        assert kl_loss(new, ref, estimator).tolist() == pytest.approx(expected)


def test_k3_continues_as_tangent_when_reference_is_much_likelier() -> None:
    differences = [-200.0, K3_TANGENT - 1e-3, K3_TANGENT + 1e-3, 20.0, 200.0]
    policy = torch.tensor([-d for d in differences], dtype=torch.float64, requires_grad=True)
    found = kl_loss(policy, torch.zeros(5, dtype=torch.float64), "k3")
    (slope,) = torch.autograd.grad(found.sum(), policy)
    steepest = math.exp(K3_TANGENT) - 1
    value = steepest - K3_TANGENT
    assert found.tolist() == pytest.approx(
        [
            199.0,
            *(math.exp(d) - 1 - d for d in differences[1:2]),
            *(value + steepest * (d - K3_TANGENT) for d in differences[2:]),
        ]
    )
    assert slope.tolist() == pytest.approx(
        [1.0, 1 - math.exp(K3_TANGENT - 1e-3), *[-steepest] * 3], rel=1e-6
    )


def test_k1_k3_are_unbiased() -> None:
    logits, ref = distributions()
    logp = logits.log_softmax(0).detach()
    exact = float((logp.exp() * (logp - ref)).sum())
    for estimator in ("k1", "k3"):
        assert float((logp.exp() * kl_estimate(logp, ref, estimator)).sum()) == pytest.approx(exact)


def test_kl_loss_has_gradient_of_kl_that_estimator_stands_for() -> None:
    """Average the gradient over tokens sampled from the policy, whose probability is constant."""
    logits, ref = distributions()
    logp = logits.log_softmax(0)
    probability = logp.exp().detach()
    forward = gradient((logp.exp() * (logp - ref)).sum(), logits)
    reverse = gradient((ref.exp() * (ref - logits.log_softmax(0))).sum(), logits)
    for estimator, expected in zip(ESTIMATORS, (forward, forward, reverse), strict=True):
        found = gradient(
            (probability * kl_loss(logits.log_softmax(0), ref, estimator)).sum(), logits
        )
        assert found == pytest.approx(expected), estimator
    naive = gradient((probability * kl_estimate(logits.log_softmax(0), ref, "k1")).sum(), logits)
    assert naive == pytest.approx([0.0] * 6), "k1 needs a different gradient"


def test_adapted_coefficient_changes_by_at_most_2_percent() -> None:
    assert adapted(0.1, kl=0.5, target=0.5) == 0.1
    assert adapted(0.1, kl=0.55, target=0.5) == pytest.approx(0.1 * 1.01)
    assert adapted(0.1, kl=50.0, target=0.5) == pytest.approx(0.1 * 1.02)
    assert adapted(0.1, kl=0.0, target=0.5) == pytest.approx(0.1 * 0.98)
