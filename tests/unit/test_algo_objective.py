"""Policy objectives compared with the formulas of their papers, gradients included."""

import math

import pytest
import torch
from torch import Tensor

from paceline.algo.loss import PolicyLoss, TokenData, TokenOutputs
from paceline.algo.objective import cispo, clipped_objective, objective
from paceline.algo.settings import AlgorithmSettings
from tests.ratios import TOKENS, tensors

ROWS = torch.arange(TOKENS) // 7  # six rows, the last one short


def clip(ratio: float, s: AlgorithmSettings) -> float:
    return min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)


def plain_objective(t: dict[str, Tensor], s: AlgorithmSettings, i: int) -> float:
    """Return the quantity that is maximized for one token."""
    new, old, advantage = (t[name].tolist() for name in ("new", "old", "advantages"))
    ratio, a = math.exp(new[i] - old[i]), advantage[i]
    if s.loss == "clip":
        result = min(ratio * a, clip(ratio, s) * a)
        return max(result, s.dual_clip * a) if s.dual_clip is not None and a < 0 else result
    if s.loss == "sequence_clip":
        row = [j for j in range(TOKENS) if ROWS[j] == ROWS[i]]
        likelihoods = [math.exp(sum(part[j] for j in row)) for part in (new, old)]
        ratio = (likelihoods[0] / likelihoods[1]) ** (1 / len(row))
        return min(ratio * a, clip(ratio, s) * a)
    if s.loss == "cispo":
        return clip(ratio, s) * a * new[i]
    if s.loss == "sapo":
        temperature = s.sapo_temperatures[0] if a > 0 else s.sapo_temperatures[1]
        return 1 / (1 + math.exp(-temperature * (ratio - 1))) * 4 / temperature * a
    return a * new[i]


OBJECTIVES = [
    AlgorithmSettings(),
    AlgorithmSettings(name="dapo"),
    AlgorithmSettings(dual_clip=3.0),
    AlgorithmSettings(dual_clip=1.5, clip_high=0.3),
    AlgorithmSettings(name="gspo", clip_low=0.1, clip_high=0.2),
    AlgorithmSettings(name="cispo"),
    AlgorithmSettings(name="cispo", clip_low=0.3, clip_high=0.5),
    AlgorithmSettings(name="sapo"),
    AlgorithmSettings(name="sapo", sapo_temperatures=(0.5, 2.0)),
    AlgorithmSettings(name="pg"),
]


@pytest.mark.parametrize("settings", OBJECTIVES, ids=lambda s: f"{s.name}-{s.loss}")
@pytest.mark.parametrize("seed", range(3))
def test_token_loss_is_minus_objective_of_paper(settings: AlgorithmSettings, seed: int) -> None:
    t = tensors(seed)
    loss, _ = objective(t["new"], t["old"], t["advantages"], ROWS, settings)
    assert loss.tolist() == pytest.approx(
        [-plain_objective(t, settings, i) for i in range(TOKENS)], rel=1e-9
    )


@pytest.mark.parametrize(
    "settings",
    [s for s in OBJECTIVES if s.loss not in ("cispo", "sequence_clip")],
    ids=lambda s: f"{s.name}-{s.loss}",
)
def test_loss_gradient_matches_finite_differences(settings: AlgorithmSettings) -> None:
    t = tensors()
    weights = torch.linspace(0.1, 1, TOKENS, dtype=torch.float64)

    def loss(new: Tensor) -> Tensor:
        data = TokenData(ROWS, weights, t["old"], torch.zeros(TOKENS), t["advantages"])
        return PolicyLoss(settings)(TokenOutputs(new, torch.zeros(TOKENS)), data).loss

    assert torch.autograd.gradcheck(loss, (t["new"].requires_grad_(),))


def test_cispo_gradient_is_clipped_ratio_times_logprob_gradient() -> None:
    t = tensors()
    new = t["new"].requires_grad_()
    loss, clipped = cispo(new, t["old"], t["advantages"], 0.3, 0.5)
    loss.sum().backward()
    ratio = (t["new"] - t["old"]).exp().tolist()
    expected = [
        -a * min(max(r, 0.7), 1.5) for a, r in zip(t["advantages"].tolist(), ratio, strict=True)
    ]
    assert new.grad is not None and new.grad.tolist() == pytest.approx(expected)
    assert clipped.tolist() == [not 0.7 <= r <= 1.5 for r in ratio]
    assert 0 < sum(clipped) < TOKENS


def test_every_objective_has_plain_policy_gradient_on_fresh_tokens() -> None:
    t = tensors()
    for settings in OBJECTIVES:
        new = t["old"].clone().requires_grad_()
        loss, clipped = objective(new, t["old"], t["advantages"], ROWS, settings)
        loss.sum().backward()
        assert new.grad is not None and torch.allclose(new.grad, -t["advantages"]), settings.loss
        assert not clipped.any(), settings.loss


def gradient(t: dict[str, Tensor], advantages: Tensor, settings: AlgorithmSettings) -> Tensor:
    new = t["new"].clone().requires_grad_()
    objective(new, t["old"], advantages, ROWS, settings)[0].sum().backward()
    assert new.grad is not None
    return new.grad


@pytest.mark.parametrize("seed", range(3))
def test_gspo_gradient_equals_sequence_form_when_row_shares_advantage(seed: int) -> None:
    t, settings = tensors(seed), AlgorithmSettings(name="gspo", clip_low=0.01, clip_high=0.02)
    advantages = t["advantages"][ROWS]
    new = t["new"].clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(int(ROWS.max()) + 1):
        inside, a = row == ROWS, t["advantages"][row]
        s = (new - t["old"])[inside].mean().exp()
        total = total - inside.sum() * torch.minimum(s * a, s.clamp(0.99, 1.02) * a)
    total.backward()
    found = gradient(t, advantages, settings)
    assert new.grad is not None and torch.allclose(found, new.grad)
    assert 0 < (found == 0).sum() < TOKENS, "some rows are clipped"


def test_gspo_token_has_no_gradient_when_its_weight_is_zero() -> None:
    t, settings = tensors(), AlgorithmSettings(name="gspo", clip_low=1.0, clip_high=9.0)
    keep = (torch.arange(TOKENS) % 3 > 0).double()
    found = gradient(t, keep, settings)
    assert ((found != 0) == (keep > 0)).all()


def test_gspo_gradient_follows_token_advantages_when_they_sum_to_zero() -> None:
    t, settings = tensors(), AlgorithmSettings(name="gspo", clip_low=1.0, clip_high=9.0)
    advantages = torch.where(torch.arange(TOKENS) % 2 == 0, 1.0, -1.0).double()
    assert (gradient(t, advantages, settings).sign() == -advantages).all()


@pytest.mark.parametrize("settings", OBJECTIVES, ids=lambda s: f"{s.name}-{s.loss}")
def test_gradient_is_finite_when_ratio_exceeds_float32(settings: AlgorithmSettings) -> None:
    old = torch.tensor([-120.0, -1.0, -120.0, -1.0, -1.0])
    new = torch.tensor([-1.0, -120.0, -1.0, -120.0, -1.0], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    loss, _ = objective(new, old, advantages, torch.arange(5), settings)
    loss.sum().backward()
    assert new.grad is not None and new.grad.isfinite().all() and loss.isfinite().all()


def test_clipped_token_has_no_gradient() -> None:
    log_ratio = torch.tensor([1.0, -1.0, 0.0], requires_grad=True)
    loss, clipped = clipped_objective(log_ratio, torch.tensor([1.0, -1.0, 1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert clipped.tolist() == [True, True, False]
    assert log_ratio.grad is not None and log_ratio.grad.tolist() == [0.0, 0.0, -1.0]
