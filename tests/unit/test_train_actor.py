"""Actor and critic: what one step does and what it reports."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.algo.advantage import advantages
from paceline.algo.loss import ValueLoss
from paceline.algo.presets import PRESETS
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import DataError
from paceline.train.actor import Actor, train_on
from paceline.train.critic import Critic
from paceline.train.settings import TrainSettings
from paceline.train.single import SingleDevice
from paceline.types import Batch
from tests.contract.test_train_engine import random_batch, tiny, weights_of

FAST = TrainSettings(learning_rate=1e-2)


def actor(
    algorithm: AlgorithmSettings, train: TrainSettings = FAST, total_steps: int = 10
) -> Actor:
    return Actor(SingleDevice(tiny("qwen2"), train), algorithm, train, total_steps, max_length=1)


def on_policy(who: Actor) -> Batch:
    batch = random_batch()
    return replace(batch, logprobs=who.logprobs(batch))


def critic_of(model: PreTrainedModel, algorithm: AlgorithmSettings, steps: int) -> Critic:
    return Critic(SingleDevice(model.base_model, FAST, head="value"), algorithm, FAST, steps)


def test_an_on_policy_step_reports_a_ratio_of_one_and_no_gap() -> None:
    who = actor(AlgorithmSettings())
    metrics = who.update(on_policy(who), step=0)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5) and metrics[
        "ratio_max"
    ] == pytest.approx(1, abs=1e-5)
    assert (
        metrics["clip_fraction"] == 0
        and metrics["kl"] == pytest.approx(0, abs=1e-6)
        and metrics["logprob_diff_max"] < 1e-5
    )
    assert metrics["lr"] == 1e-2 and metrics["grad_norm"] > 0 and metrics["weights_changed"] == 1
    assert (
        0 < metrics["entropy"] < math.log(37) + 1e-6
        and metrics["tokens"] == random_batch().mask.sum()
    )


def test_epochs_and_mini_batches_make_that_many_updates_and_the_gap_is_of_the_first() -> None:
    who = actor(AlgorithmSettings(epochs=2, mini_batches=3))
    metrics = who.update(on_policy(who), step=0)
    assert metrics["updates"] == 6 and metrics["updates_skipped"] == 0
    assert metrics["logprob_diff_max"] < 1e-5 < metrics["ratio_max"] - 1


def test_the_same_step_is_the_same_update() -> None:
    results = []
    for _ in range(2):
        who = actor(AlgorithmSettings(epochs=2, mini_batches=2))
        who.update(random_batch(), step=3)
        results.append(weights_of(who.engine))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_rate_of_zero_is_reported_as_weights_that_did_not_change() -> None:
    train = TrainSettings(learning_rate=0)
    who = actor(AlgorithmSettings(), train)
    before = weights_of(who.engine)
    assert who.update(random_batch(), step=0)["weights_changed"] == 0
    assert all(torch.equal(before[name], weight) for name, weight in who.engine.export_weights())


def test_a_step_with_a_broken_gradient_is_reported_as_skipped() -> None:
    who, batch = actor(AlgorithmSettings()), random_batch()
    metrics = who.update(
        replace(batch, advantages=np.full(batch.num_tokens, np.float32(math.inf))), step=0
    )
    assert (
        metrics["updates_skipped"] == 1
        and metrics["weights_changed"] == 0
        and math.isnan(metrics["grad_norm"])
    )


def test_fresh_tokens_show_mismatch_and_older_ones_staleness() -> None:
    who, batch = actor(AlgorithmSettings()), random_batch()
    gap = np.abs(who.logprobs(batch) - batch.logprobs)[batch.mask]
    fresh = who.update(batch, step=0)
    assert (
        fresh["logprob_diff_max"] == pytest.approx(float(gap.max()), rel=1e-5)
        and fresh["logprob_diff_max"] > 0.1
    )
    assert fresh["stale_fraction"] == 0 and not any(name.startswith("staleness") for name in fresh)
    stale = who.update(batch, step=5)
    assert stale["stale_fraction"] == 1 and stale["staleness_ratio_max"] > 1
    assert not any(name.startswith(("mismatch", "logprob_diff")) for name in stale)


def test_with_one_update_per_step_recomputing_costs_no_forward_pass_and_gives_the_same_step() -> (
    None
):
    """With a learning rate of 0 for the second pass nothing moves, so two updates see what one sees."""
    settings = {"correction": "truncate", "correction_range": (0.9, 1.1), "dual_clip": 3.0}
    once, twice = (
        actor(AlgorithmSettings.model_validate(settings)),
        actor(AlgorithmSettings.model_validate(settings | {"epochs": 2})),
    )
    calls = []
    once.engine.logprobs = calls.append  # type: ignore[method-assign, assignment]
    frozen = TrainSettings(learning_rate=0)
    twice._train = frozen
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


def test_m2po_masks_over_the_whole_batch() -> None:
    small = TrainSettings(
        learning_rate=1e-2, micro_batch_tokens=20
    )  # so that a micro-batch is not all of it
    who, batch = (
        actor(AlgorithmSettings(correction="m2po", m2_threshold=0.04), small),
        random_batch(),
    )
    squares = sorted(
        np.square((who.logprobs(batch) - batch.logprobs)[batch.mask].astype(np.float64))
    )
    kept = sum(np.mean(squares[: k + 1]) <= 0.04 for k in range(len(squares)))
    assert who.update(batch, step=0)["masked_fraction"] == pytest.approx(
        1 - kept / len(squares)
    ) and 0 < kept < len(squares)


def test_answers_that_were_cut_off_do_not_disturb_the_correction_of_the_others() -> None:
    settings = AlgorithmSettings(
        correction="truncate", correction_level="sequence", reject_range=(1e-9, 1e9), epochs=2
    )
    who, batch = actor(settings), random_batch()
    last = batch.offsets[-2]
    alone = replace(
        batch, mask=batch.mask & (np.arange(batch.num_tokens) >= last)
    )  # fewer tokens than there are rows before it
    alone.mask[last + 2 :] = False
    alone.mask[last + 1] = True
    assert who.update(alone, step=0)["tokens"] == 1


class Passes:
    """An engine that notes which rows it was given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def forward_backward(self, batch: Batch, loss: Any) -> dict[str, float]:
        self.seen.append(batch.tokens.tolist())
        return {"loss": 0.0}

    def optimizer_step(self, lr: float) -> float:
        return 1.0


def test_passes_over_a_batch_cut_it_differently() -> None:
    engine, algorithm = Passes(), AlgorithmSettings(epochs=2, mini_batches=2)
    train_on(engine, random_batch(rows=16), ValueLoss(None), algorithm, lr=0.0, step=1)  # type: ignore[arg-type]
    assert sorted(engine.seen[:2]) != sorted(engine.seen[2:]), (
        "both passes had the same mini-batches"
    )


def test_a_batch_with_nothing_left_to_train_changes_nothing() -> None:
    who, batch = actor(AlgorithmSettings(overlong="mask")), random_batch()
    before = weights_of(who.engine)
    metrics = who.update(replace(batch, mask=np.zeros_like(batch.mask)), step=0)
    assert metrics["weights_changed"] == 0 and metrics["updates"] == 0
    assert all(torch.equal(before[name], weight) for name, weight in who.engine.export_weights())


def test_a_rate_lost_in_rounding_is_reported_as_weights_that_did_not_change() -> None:
    metrics = actor(AlgorithmSettings(), TrainSettings(learning_rate=1e-30)).update(
        random_batch(), step=0
    )
    assert metrics["grad_norm"] > 0 and metrics["weights_changed"] == 0


def test_a_batch_without_advantages_is_refused() -> None:
    with pytest.raises(DataError, match="advantages"):
        actor(AlgorithmSettings()).update(replace(random_batch(), advantages=None), step=0)


def bandit(who: Actor, rng: np.random.Generator, lever: int) -> Batch:
    """One prompt, one token sampled from the policy; reward 1 for the right one."""
    rows = 32
    everything = np.stack([np.zeros(37), np.arange(37)], 1).astype(np.int32).ravel()
    pairs = np.full(37, 2, np.int32)
    mask = np.tile([False, True], 37)
    zeros = np.zeros(74, np.float32)
    every = Batch(everything, pairs, mask, zeros, np.zeros(74, np.int32), zeros[:37], pairs)
    logprobs = who.logprobs(every)[1::2]
    p = np.exp(logprobs.astype(np.float64))
    drawn = rng.choice(37, rows, p=p / p.sum())
    flat = np.stack([np.zeros(rows), drawn], 1).astype(np.int32).ravel()
    sampled = np.stack([np.zeros(rows), logprobs[drawn]], 1).astype(np.float32).ravel()
    rewards = (drawn == lever).astype(np.float32)
    return Batch(
        flat,
        np.full(rows, 2, np.int32),
        mask[: 2 * rows],
        sampled,
        np.zeros(2 * rows, np.int32),
        rewards,
        np.zeros(rows, np.int32),
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_token_that_pays_becomes_the_likely_one(name: str) -> None:
    algorithm = AlgorithmSettings.model_validate({"name": name, "overlong": "keep"})
    who, rng = actor(algorithm, total_steps=60), np.random.default_rng(0)
    critic = critic_of(tiny("qwen2"), algorithm, 60)
    share = []
    for step in range(60):
        batch = replace(bandit(who, rng, lever=7), baselines=np.zeros(32, np.float32))
        batch = advantages(
            batch, algorithm, critic.values(batch) if algorithm.needs_critic else None
        )
        who.update(batch, step)
        if algorithm.needs_critic:
            critic.update(batch, step)
        share.append(batch.rewards.mean())
    assert share[0] < 0.3 and np.mean(share[-5:]) > 0.9


def test_a_critic_learns_the_reward_to_expect() -> None:
    algorithm, batch = AlgorithmSettings(name="ppo"), random_batch()
    critic = critic_of(tiny("qwen2"), algorithm, 40)
    first = last = 0.0
    for step in range(40):
        filled = advantages(batch, algorithm, critic.values(batch))
        last = critic.update(filled, step)["value_error"]
        first = first or last
    assert last < first / 5


def test_a_critic_without_returns_is_refused() -> None:
    with pytest.raises(DataError, match="returns"):
        critic_of(tiny("qwen2"), AlgorithmSettings(name="ppo"), 1).update(
            replace(random_batch(), returns=None), 0
        )
