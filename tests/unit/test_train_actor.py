"""Actor and critic: what one train step changes and which metrics it reports."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.algo.advantage import advantages
from paceline.algo.loss import LossTerms, PolicyLoss, TokenData, TokenOutputs, ValueLoss
from paceline.algo.presets import PRESETS
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import DataError
from paceline.training.actor import Actor, train_on
from paceline.training.critic import Critic
from paceline.training.replay import replay
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice
from paceline.types import Batch
from tests.contract.test_train_engine import random_batch, same_bits, tiny, weights_of
from tests.fault_report import Fault

FAST = TrainSettings(learning_rate=1e-2)


def actor(
    algorithm: AlgorithmSettings, train: TrainSettings = FAST, total_steps: int = 10
) -> Actor:
    return Actor(SingleDevice(tiny("qwen2"), train), algorithm, train, total_steps, max_length=1)


def on_policy(policy: Actor) -> Batch:
    batch = random_batch()
    return replace(batch, logprobs=policy.logprobs(batch))


def critic_of(model: PreTrainedModel, algorithm: AlgorithmSettings, steps: int) -> Critic:
    return Critic(SingleDevice(model.base_model, FAST, head="value"), algorithm, FAST, steps)


def test_on_policy_step_reports_ratio_1_without_logprob_difference() -> None:
    policy = actor(AlgorithmSettings())
    metrics = policy.update(on_policy(policy), step=0)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0 and metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["logprob_diff_max"] < 1e-5
    assert metrics["lr"] == 1e-2 and metrics["grad_norm"] > 0 and metrics["weights_changed"] == 1
    assert 0 < metrics["entropy"] < math.log(37) + 1e-6
    assert metrics["tokens"] == random_batch().mask.sum()


def test_update_measures_mismatch_in_first_of_several_updates() -> None:
    policy = actor(AlgorithmSettings(epochs=2, mini_batches=3))
    metrics = policy.update(on_policy(policy), step=0)
    assert metrics["updates"] == 6 and metrics["updates_skipped"] == 0
    assert metrics["logprob_diff_max"] < 1e-5 < metrics["ratio_max"] - 1


def test_update_is_deterministic_for_same_step() -> None:
    results = []
    for _ in range(2):
        policy = actor(AlgorithmSettings(epochs=2, mini_batches=2))
        policy.update(random_batch(), step=3)
        results.append(weights_of(policy.engine))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_update_reports_unchanged_weights_when_rate_is_zero() -> None:
    train = TrainSettings(learning_rate=0)
    policy = actor(AlgorithmSettings(), train)
    before = weights_of(policy.engine)
    assert policy.update(random_batch(), step=0)["weights_changed"] == 0
    assert all(torch.equal(before[name], weight) for name, weight in policy.engine.export_weights())


@pytest.mark.fault("E1", "infinite advantages")
def test_update_is_skipped_when_gradient_is_not_finite(fault: Fault) -> None:
    policy, batch = actor(AlgorithmSettings()), random_batch()
    metrics = policy.update(
        replace(batch, advantages=np.full(batch.num_tokens, np.float32(math.inf))), step=0
    )
    assert metrics["updates_skipped"] == 1 and metrics["weights_changed"] == 0
    assert math.isnan(metrics["grad_norm"])
    fault.fired()


class InfiniteLoss(PolicyLoss):
    """A loss that overflows although its gradient does not."""

    def __call__(self, outputs: TokenOutputs, data: TokenData) -> LossTerms:
        terms = PolicyLoss.__call__(self, outputs, data)
        return replace(terms, loss=terms.loss + torch.tensor(math.inf))


def skips(settings: AlgorithmSettings, act: Callable[[Actor], float]) -> bool:
    """Return whether an update changes neither weights nor the state of the optimizer."""
    policy, clean = actor(settings), actor(settings)
    before = weights_of(policy.engine)
    assert act(policy) == 1, "the update was not skipped"
    same = same_bits(before, weights_of(policy.engine))
    for each in (policy, clean):
        each.update(random_batch(seed=1), step=0)
    return same and same_bits(weights_of(clean.engine), weights_of(policy.engine))


@pytest.mark.fault("E1", "infinite loss with a finite gradient")
def test_update_is_skipped_when_loss_is_infinite(fault: Fault) -> None:
    settings = AlgorithmSettings()

    def act(policy: Actor) -> float:
        found = train_on(policy.engine, random_batch(), InfiniteLoss(settings), settings, 1e-2, 0)
        return found["updates_skipped"]

    assert skips(settings, act)
    fault.fired()


@pytest.mark.parametrize("more", [{}, {"correction": "truncate", "epochs": 1}], ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.fault("E1", "sampled log-probability is {value}")
def test_update_is_skipped_when_sampled_logprob_is_not_finite(
    value: float, more: dict[str, Any], fault: Fault
) -> None:
    batch = random_batch()
    batch.logprobs[np.flatnonzero(batch.mask)[3]] = value
    settings = AlgorithmSettings(**more)
    assert skips(settings, lambda policy: policy.update(batch, step=0)["updates_skipped"])
    fault.fired()


@pytest.mark.fault("E1", "NaN in one of two mini-batches")
def test_only_bad_mini_batch_is_skipped(fault: Fault) -> None:
    policy, batch = actor(AlgorithmSettings(mini_batches=2)), random_batch()
    assert batch.advantages is not None
    batch.advantages[np.flatnonzero(batch.mask)[0]] = math.nan
    metrics = policy.update(batch, step=0)
    assert (metrics["updates"], metrics["updates_skipped"]) == (2, 1)
    assert metrics["weights_changed"] == 1
    fault.fired()
    weights = weights_of(policy.engine).values()
    assert all(torch.isfinite(weight).all() for weight in weights)


def test_replay_names_rows_that_are_not_finite_without_changing_weights() -> None:
    policy, batch = actor(AlgorithmSettings()), random_batch()
    expected = policy.update(random_batch(), step=0)
    policy = actor(AlgorithmSettings())
    before = weights_of(policy.engine)
    found = replay(policy, batch, step=0)
    assert found["rows"] == []
    assert found["updates"][0]["grad_norm"] == expected["grad_norm"]
    assert found["updates"][0]["loss"] == expected["loss"]
    assert batch.advantages is not None
    row = int(np.flatnonzero(np.add.reduceat(batch.mask, batch.offsets[:-1]))[-1])
    inside = batch.mask & (np.repeat(np.arange(batch.num_rows), batch.lengths) == row)
    batch.advantages[inside] = 1e30
    found = replay(policy, batch, step=0)
    assert math.isnan(found["updates"][0]["grad_norm"])
    assert [(each["row"], each["not finite"]) for each in found["rows"]] == [
        (row, ["its gradient"])
    ]
    batch.advantages[inside] = math.inf
    assert replay(policy, batch, step=0)["rows"][0]["not finite"] == ["its advantages"]
    assert same_bits(before, weights_of(policy.engine))


def test_update_reports_mismatch_of_fresh_staleness_of_older_tokens() -> None:
    policy, batch = actor(AlgorithmSettings()), random_batch()
    difference = np.abs(policy.logprobs(batch) - batch.logprobs)[batch.mask]
    fresh = policy.update(batch, step=0)
    assert fresh["logprob_diff_max"] == pytest.approx(float(difference.max()), rel=1e-5)
    assert fresh["logprob_diff_max"] > 0.1
    assert fresh["stale_fraction"] == 0 and not any(name.startswith("staleness") for name in fresh)
    stale = policy.update(batch, step=5)
    assert stale["stale_fraction"] == 1 and stale["staleness_ratio_max"] > 1
    assert not any(name.startswith(("mismatch", "logprob_diff")) for name in stale)


@pytest.mark.parametrize("more", [{}, {"correction": "truncate", "epochs": 2}], ids=str)
def test_rate_is_lowered_when_policy_is_far_from_stale_data(more: dict[str, Any]) -> None:
    policy = actor(AlgorithmSettings.model_validate(more))
    batch = on_policy(policy)
    far = replace(batch, logprobs=batch.logprobs - np.float32(0.3))
    metrics = policy.update(far, step=5)
    kl = math.exp(-0.3) - 1 + 0.3
    assert metrics["staleness_kl"] == pytest.approx(kl, rel=0.5) and metrics["stale_fraction"] == 1
    target = FAST.staleness_kl_target
    assert metrics["lr"] == pytest.approx(1e-2 * target / metrics["staleness_kl"])


def test_rate_is_unchanged_when_data_is_fresh_or_target_is_zero() -> None:
    policy = actor(AlgorithmSettings())
    batch = on_policy(policy)
    far = replace(batch, logprobs=batch.logprobs - np.float32(0.3))
    fresh = replace(far, versions=np.where(far.mask, 5, -1).astype(np.int32))
    assert policy.update(fresh, step=5)["lr"] == 1e-2
    assert policy.update(replace(batch, logprobs=policy.logprobs(batch)), step=6)["lr"] == 1e-2
    unscaled = actor(AlgorithmSettings(), FAST.model_copy(update={"staleness_kl_target": 0.0}))
    assert unscaled.update(far, step=5)["lr"] == 1e-2


def test_recomputed_proximal_needs_no_forward_pass_for_one_update() -> None:
    """Compare with two updates at learning rate 0, which see the same weights."""
    settings = {"correction": "truncate", "correction_range": (0.9, 1.1), "dual_clip": 3.0}
    once = actor(AlgorithmSettings.model_validate(settings))
    twice = actor(AlgorithmSettings.model_validate(settings | {"epochs": 2}))
    calls = []
    once.engine.logprobs = calls.append  # type: ignore[method-assign, assignment]
    twice._train = TrainSettings(learning_rate=0)
    one, other = once.update(random_batch(), step=1), twice.update(random_batch(), step=1)
    assert not calls
    for name in (
        "loss",
        "truncated_fraction",
        "masked_fraction",
        "ratio_max",
        "staleness_kl",
        "staleness_ratio_max",
        "stale_fraction",
    ):
        assert one[name] == pytest.approx(other[name], abs=1e-5), name
    assert 0 < one["truncated_fraction"] < 1


def test_m2po_masks_over_whole_batch() -> None:
    several_micro_batches = TrainSettings(learning_rate=1e-2, micro_batch_tokens=20)
    algorithm = AlgorithmSettings(correction="m2po", m2_threshold=0.04)
    policy, batch = actor(algorithm, several_micro_batches), random_batch()
    log_ratio = (policy.logprobs(batch) - batch.logprobs)[batch.mask].astype(np.float64)
    squares = sorted(np.square(log_ratio))
    kept = sum(np.mean(squares[: k + 1]) <= 0.04 for k in range(len(squares)))
    assert 0 < kept < len(squares)
    masked = policy.update(batch, step=0)["masked_fraction"]
    assert masked == pytest.approx(1 - kept / len(squares))


def test_correction_ignores_rows_without_trained_tokens() -> None:
    settings = AlgorithmSettings(
        correction="truncate", correction_level="sequence", reject_range=(1e-9, 1e9), epochs=2
    )
    policy, batch = actor(settings), random_batch()
    last = batch.offsets[-2]
    # The last row has fewer trained tokens than there are rows before it.
    alone = replace(batch, mask=batch.mask & (np.arange(batch.num_tokens) >= last))
    alone.mask[last + 2 :] = False
    alone.mask[last + 1] = True
    assert policy.update(alone, step=0)["tokens"] == 1


class Passes:
    """Engine that records the tokens it was given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def forward_backward(self, batch: Batch, loss: Any) -> dict[str, float]:
        self.seen.append(batch.tokens.tolist())
        return {"loss": 0.0}

    def optimizer_step(self, lr: float, skip: bool = False) -> float:
        return 1.0


def test_epochs_split_batch_into_different_mini_batches() -> None:
    engine, algorithm = Passes(), AlgorithmSettings(epochs=2, mini_batches=2)
    train_on(engine, random_batch(rows=16), ValueLoss(None), algorithm, lr=0.0, step=1)  # type: ignore[arg-type]
    assert sorted(engine.seen[:2]) != sorted(engine.seen[2:]), (
        "both epochs had the same mini-batches"
    )


def test_update_changes_nothing_when_no_token_is_trained() -> None:
    policy, batch = actor(AlgorithmSettings(overlong="mask")), random_batch()
    before = weights_of(policy.engine)
    metrics = policy.update(replace(batch, mask=np.zeros_like(batch.mask)), step=0)
    assert metrics["weights_changed"] == 0 and metrics["updates"] == 0
    assert all(torch.equal(before[name], weight) for name, weight in policy.engine.export_weights())


def test_update_reports_unchanged_weights_when_rate_is_lost_in_rounding() -> None:
    metrics = actor(AlgorithmSettings(), TrainSettings(learning_rate=1e-30)).update(
        random_batch(), step=0
    )
    assert metrics["grad_norm"] > 0 and metrics["weights_changed"] == 0


def test_update_fails_when_batch_has_no_advantages() -> None:
    with pytest.raises(DataError, match="advantages"):
        actor(AlgorithmSettings()).update(replace(random_batch(), advantages=None), step=0)


def bandit(policy: Actor, rng: np.random.Generator, lever: int) -> Batch:
    """Return completions of one token sampled from the policy, with reward 1 for `lever`."""
    rows = 32
    vocabulary = np.stack([np.zeros(37), np.arange(37)], 1).astype(np.int32).ravel()
    pairs = np.full(37, 2, np.int32)
    mask = np.tile([False, True], 37)
    zeros = np.zeros(74, np.float32)
    every = Batch(vocabulary, pairs, mask, zeros, np.zeros(74, np.int32), zeros[:37], pairs)
    logprobs = policy.logprobs(every)[1::2]
    p = np.exp(logprobs.astype(np.float64))
    sampled = rng.choice(37, rows, p=p / p.sum())
    tokens = np.stack([np.zeros(rows), sampled], 1).astype(np.int32).ravel()
    token_logprobs = np.stack([np.zeros(rows), logprobs[sampled]], 1).astype(np.float32).ravel()
    rewards = (sampled == lever).astype(np.float32)
    return Batch(
        tokens,
        np.full(rows, 2, np.int32),
        mask[: 2 * rows],
        token_logprobs,
        np.zeros(2 * rows, np.int32),
        rewards,
        np.zeros(rows, np.int32),
    )


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "distill"])
def test_rewarded_token_becomes_likely(name: str) -> None:
    algorithm = AlgorithmSettings.model_validate({"name": name, "overlong": "keep"})
    policy, rng = actor(algorithm, total_steps=60), np.random.default_rng(0)
    critic = critic_of(tiny("qwen2"), algorithm, 60)
    rewarded = []
    for step in range(60):
        batch = replace(bandit(policy, rng, lever=7), baselines=np.zeros(32, np.float32))
        batch = advantages(
            batch, algorithm, critic.values(batch) if algorithm.needs_critic else None
        )
        policy.update(batch, step)
        if algorithm.needs_critic:
            critic.update(batch, step)
        rewarded.append(batch.rewards.mean())
    assert rewarded[0] < 0.3 and np.mean(rewarded[-5:]) > 0.9


def test_critic_learns_expected_reward() -> None:
    algorithm, batch = AlgorithmSettings(name="ppo"), random_batch()
    critic = critic_of(tiny("qwen2"), algorithm, 40)
    first = last = 0.0
    for step in range(40):
        filled = advantages(batch, algorithm, critic.values(batch))
        last = critic.update(filled, step)["value_error"]
        first = first or last
    assert last < first / 5


def test_critic_update_fails_when_batch_has_no_returns() -> None:
    with pytest.raises(DataError, match="returns"):
        critic_of(tiny("qwen2"), AlgorithmSettings(name="ppo"), 1).update(
            replace(random_batch(), returns=None), 0
        )
