"""Train steps of the controller: worker calls, batches, the adaptive KL coefficient, monitors."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from paceline.algo.settings import AlgorithmSettings
from paceline.observe.health import Health
from paceline.training.skipped import SkippedUpdates, likely_cause
from paceline.training.trainer import Monitor, Trainer
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
    """A worker that records calls and returns fixed results."""

    def __init__(self, **results: Any) -> None:
        self.results, self.calls = results, dict[str, list[tuple[Any, ...]]]()

    async def call(self, role: str, method: str, *arguments: Any) -> Any:
        self.calls.setdefault(method, []).append(arguments)
        return self.results[method]

    def start_call(self, role: str, method: str, *arguments: Any) -> Any:
        return self.call(role, method, *arguments)


LEARNING = {"train/lr": 1e-3, "train/weights_changed": 1.0, "train/kl_reference": 0.3}


def make_trainer(
    algorithm: AlgorithmSettings, monitors: Sequence[Monitor] = (), **workers: Recorded
) -> Trainer:
    parts: Any = workers
    return Trainer(algorithm=algorithm, step_timeout_s=10, max_length=4, monitors=monitors, **parts)


def run(trainer: Trainer, step: int = 0, given: Batch | None = None) -> dict[str, float]:
    return asyncio.run(trainer.step(given or batch(), step))


def test_step_reports_advantage_statistics() -> None:
    actor = Recorded(update=dict(LEARNING))
    metrics = run(make_trainer(AlgorithmSettings(name="dr_grpo"), actor=actor))
    assert metrics["train/advantage_mean"] == 0 and metrics["train/advantage_std"] == 0.5
    assert metrics["train/advantage_zero_fraction"] == 0


def test_step_updates_only_critic_during_critic_warmup() -> None:
    actor = Recorded(update=dict(LEARNING))
    critic = Recorded(update={"critic/loss": 1.0}, values=np.zeros(6, np.float32))
    algorithm = AlgorithmSettings(name="ppo", critic_warmup=2)
    trainer = make_trainer(algorithm, actor=actor, critic=critic)
    for step in range(3):
        run(trainer, step)
    assert [step for _, step in critic.calls["update"]] == [0, 1, 2]
    assert [arguments[1] for arguments in actor.calls["update"]] == [2]


def test_kl_coefficient_continues_to_adapt_when_state_is_restored() -> None:
    algorithm = AlgorithmSettings(kl_coef=0.1, kl_target=0.2)
    workers = {
        "actor": Recorded(update=LEARNING),
        "ref": Recorded(logprobs=np.zeros(6, np.float32)),
    }
    trainer = make_trainer(algorithm, **workers)
    coefficients = [run(trainer, step)["train/kl_coef"] for step in range(3)]
    assert coefficients == pytest.approx([0.1, 0.102, 0.102 * 1.02])
    restored = make_trainer(algorithm, **workers)
    restored.load_state(trainer.state())
    assert run(restored, 3)["train/kl_coef"] == pytest.approx(0.1 * 1.02**3)
    _, _, passed_to_actor = workers["actor"].calls["update"][-1]
    assert passed_to_actor == pytest.approx(0.1 * 1.02**3)


def test_adaptive_kl_coefficient_scales_reward_penalty() -> None:
    algorithm = AlgorithmSettings(name="reinforce++", normalize="none", kl_coef=0.1, kl_target=0.2)
    workers = {
        "actor": Recorded(update=dict(LEARNING)),
        "ref": Recorded(logprobs=np.zeros(6, np.float32)),
    }
    trainer = make_trainer(algorithm, **workers)
    for step in range(2):
        run(trainer, step)
    first, second = (arguments[0].token_rewards for arguments in workers["actor"].calls["update"])
    assert second[MASK] == pytest.approx(1.02 * first[MASK]) and first[1] == pytest.approx(0.1)


def test_step_skips_critic_update_when_all_tokens_are_masked() -> None:
    critic = Recorded(update={"critic/loss": 1.0}, values=np.zeros(6, np.float32))
    trainer = make_trainer(
        AlgorithmSettings(name="ppo", overlong="mask"),
        actor=Recorded(update=dict(LEARNING)),
        critic=critic,
    )
    run(trainer, given=replace(batch(), truncated=np.ones(2, np.bool_)))
    assert "update" not in critic.calls


def test_kl_coefficient_stays_constant_without_target() -> None:
    workers = {
        "actor": Recorded(update=dict(LEARNING)),
        "ref": Recorded(logprobs=np.zeros(6, np.float32)),
    }
    trainer = make_trainer(AlgorithmSettings(kl_coef=0.1), **workers)
    assert [run(trainer, step)["train/kl_coef"] for step in range(2)] == [0.1, 0.1]


def test_actor_batch_masks_or_keeps_truncated_completions() -> None:
    for overlong, trained, rewards in (
        ("mask", 2, [1, 0]),
        ("penalty", 4, [1, 0]),
        ("keep", 4, [1, 0]),
    ):
        actor = Recorded(update=dict(LEARNING))
        run(make_trainer(AlgorithmSettings.model_validate({"overlong": overlong}), actor=actor))
        seen = actor.calls["update"][0][0]
        assert seen.mask.sum() == trained and seen.rewards.tolist() == rewards


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"train/entropy": nan}, "the log-probs of the trainer are not finite"),
        ({"train/loss": nan}, "the loss is nan; lower train.learning_rate"),
        ({"critic/loss": inf}, "the loss of the critic is inf; lower train.learning_rate"),
        ({"train/loss": 0.5, "critic/loss": 0.5}, "only the gradient is not finite"),
    ],
)
def test_likely_cause_names_first_value_that_is_not_finite(
    metrics: dict[str, float], cause: str
) -> None:
    assert likely_cause(batch(), metrics).startswith(cause)


def test_timeout_error_of_worker_is_not_reported_as_step_timeout() -> None:
    class Failing(Recorded):
        async def call(self, role: str, method: str, *arguments: Any) -> Any:
            raise TimeoutError("the file server does not respond")

    trainer = make_trainer(AlgorithmSettings(), actor=Failing())
    with pytest.raises(TimeoutError, match="the file server does not respond"):
        run(trainer)


def test_failed_dump_of_skipped_update_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: IO[bytes], **arrays: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    metrics = {"train/updates": 2.0, "train/updates_skipped": 1.0}
    SkippedUpdates(tmp_path, {}).check(batch(), 0, metrics)
    assert "cannot save the batch of a skipped update: no space left" in caplog.text
    assert list((tmp_path / "skipped").iterdir()) == []


def test_health_monitor_warns_when_step_learns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    actor = Recorded(update={"train/lr": 0.0, "train/weights_changed": 0.0})
    run(
        make_trainer(AlgorithmSettings(), [Health()], actor=actor),
        given=batch(rewards=(0.5, 0.5)),
    )
    logged = " ".join(record.getMessage() for record in caplog.records)
    assert "learning rate is 0" in logged and "same reward" in logged
    assert "changed no weight" not in logged
