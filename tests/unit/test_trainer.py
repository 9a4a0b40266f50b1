"""The trainer's part of a step: who is asked, what reaches the actor, the steered KL coefficient, and the warnings."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from paceline.algo.settings import AlgorithmSettings
from paceline.remote.worker import Worker
from paceline.train.trainer import Trainer
from paceline.types import Batch

MASK = np.array([0, 1, 1, 0, 1, 1], np.bool_)


def batch(rewards: tuple[float, float] = (1.0, 0.0)) -> Batch:
    return Batch(
        tokens=np.arange(6, dtype=np.int32),
        lengths=np.array([3, 3], np.int32),
        mask=MASK,
        logprobs=np.where(MASK, -1.0, 0.0).astype(np.float32),
        versions=np.where(MASK, 0, -1).astype(np.int32),
        rewards=np.array(rewards, np.float32),
        groups=np.zeros(2, np.int32),
        truncated=np.array([True, False]),
    )


class Recorded:
    """A worker that remembers what it was asked and answers from a script."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, dict[str, list[tuple[Any, ...]]]()

    async def call(self, role: str, method: str, *arguments: Any) -> Any:
        self.asked.setdefault(method, []).append(arguments)
        return self.answers[method]

    def start_call(self, role: str, method: str, *arguments: Any) -> Any:
        return self.call(role, method, *arguments)


LEARNING = {"train/lr": 1e-3, "train/weights_changed": 1.0, "train/kl_reference": 0.3}


def trainer(algorithm: AlgorithmSettings, **workers: Recorded) -> Trainer:
    parts = {name: cast(Worker, worker) for name, worker in workers.items()}
    return Trainer(algorithm=algorithm, step_timeout_s=10, max_length=4, **parts)  # type: ignore[arg-type]


def run(who: Trainer, step: int = 0, given: Batch | None = None) -> dict[str, float]:
    return asyncio.run(who.step(given or batch(), step))


def test_a_step_reports_the_advantages_it_trained_on() -> None:
    metrics = run(trainer(AlgorithmSettings(name="dr_grpo"), actor=Recorded(update=dict(LEARNING))))
    assert metrics["train/advantage_mean"] == 0 and metrics["train/advantage_std"] == 0.5
    assert metrics["train/advantage_zero_fraction"] == 0


def test_while_the_critic_warms_up_only_the_critic_learns() -> None:
    actor = Recorded(update=dict(LEARNING))
    critic = Recorded(update={"critic/loss": 1.0}, values=np.zeros(6, np.float32))
    who = trainer(AlgorithmSettings(name="ppo", critic_warmup=2), actor=actor, critic=critic)
    for step in range(3):
        run(who, step)
    assert [step for _, step in critic.asked["update"]] == [0, 1, 2]
    assert [arguments[1] for arguments in actor.asked["update"]] == [2]


def test_the_kl_coefficient_is_steered_and_survives_a_restart() -> None:
    algorithm = AlgorithmSettings(kl_coef=0.1, kl_target=0.2)
    workers = {
        "actor": Recorded(update=LEARNING),
        "ref": Recorded(logprobs=np.zeros(6, np.float32)),
    }
    who = trainer(algorithm, **workers)
    assert [run(who, step)["train/kl_coef"] for step in range(3)] == pytest.approx(
        [0.1, 0.102, 0.102 * 1.02]
    )
    again = trainer(algorithm, **workers)
    again.load_state(who.state())
    assert run(again, 3)["train/kl_coef"] == pytest.approx(0.1 * 1.02**3)
    assert workers["actor"].asked["update"][-1][2] == pytest.approx(0.1 * 1.02**3), (
        "the actor is told"
    )


def test_the_steered_coefficient_is_also_what_is_taken_off_rewards() -> None:
    algorithm = AlgorithmSettings(name="reinforce++", normalize="none", kl_coef=0.1, kl_target=0.2)
    workers = {
        "actor": Recorded(update=dict(LEARNING)),
        "ref": Recorded(logprobs=np.zeros(6, np.float32)),
    }
    who = trainer(algorithm, **workers)
    for step in range(2):
        run(who, step)
    first, second = (arguments[0].token_rewards for arguments in workers["actor"].asked["update"])
    assert second[MASK] == pytest.approx(1.02 * first[MASK]) and first[1] == pytest.approx(0.1)


def test_where_nothing_is_left_to_learn_from_the_critic_is_not_asked() -> None:
    critic = Recorded(update={"critic/loss": 1.0}, values=np.zeros(6, np.float32))
    who = trainer(
        AlgorithmSettings(name="ppo", overlong="mask"),
        actor=Recorded(update=dict(LEARNING)),
        critic=critic,
    )
    run(who, given=replace(batch(), truncated=np.ones(2, np.bool_)))
    assert "update" not in critic.asked


def test_a_fixed_coefficient_stays() -> None:
    workers = {
        "actor": Recorded(update=dict(LEARNING)),
        "ref": Recorded(logprobs=np.zeros(6, np.float32)),
    }
    who = trainer(AlgorithmSettings(kl_coef=0.1), **workers)
    assert [run(who, step)["train/kl_coef"] for step in range(2)] == [0.1, 0.1]


def test_answers_that_were_cut_off_are_masked_or_penalised_before_the_actor_sees_them() -> None:
    for overlong, trained, rewards in (
        ("mask", 2, [1, 0]),
        ("penalty", 4, [1, 0]),
        ("keep", 4, [1, 0]),
    ):
        actor = Recorded(update=dict(LEARNING))
        run(trainer(AlgorithmSettings.model_validate({"overlong": overlong}), actor=actor))
        seen = actor.asked["update"][0][0]
        assert seen.mask.sum() == trained and seen.rewards.tolist() == rewards


def test_a_step_that_teaches_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    who = trainer(
        AlgorithmSettings(), actor=Recorded(update={"train/lr": 0.0, "train/weights_changed": 0.0})
    )
    run(who, given=batch(rewards=(0.5, 0.5)))
    said = " ".join(record.getMessage() for record in caplog.records)
    assert (
        "learning rate is 0" in said and "same reward" in said and "changed no weight" not in said
    )
