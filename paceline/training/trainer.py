"""Controller side of a train step: values, rewards, advantages, then the updates.

Actor and critic update at the same time. The trainer knows the algorithm and the worker of each
role, but no backend or schedule. It waits for the workers, at most step_timeout_s per step.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.algo.advantage import advantages, kl_of_tokens
from paceline.algo.joined_rows import joined
from paceline.algo.kl import adapted
from paceline.algo.settings import AlgorithmSettings
from paceline.algo.shaping import shape_rewards
from paceline.errors import StalledError
from paceline.plugins import Plugin
from paceline.remote.worker import Worker
from paceline.training.skipped import SkippedUpdates
from paceline.types import Batch, FloatArray, Role


class Monitor(Protocol):
    """A check of each step's metrics."""

    def check(self, metrics: dict[str, float], step: int) -> None:
        """Log a warning or raise an error if the metrics of `step` are abnormal."""
        ...


class Trainer:
    def __init__(
        self,
        actor: Worker,
        algorithm: AlgorithmSettings,
        step_timeout_s: float,
        critic: Worker | None = None,
        ref: Worker | None = None,
        max_length: int | None = None,
        monitors: Sequence[Monitor] = (),
        skipped: SkippedUpdates | None = None,
    ) -> None:
        """`max_length` is the maximum number of tokens of a completion."""
        self._skipped = skipped
        self._actor = actor
        self._critic = critic
        self._ref = ref
        self._algorithm = algorithm
        self._timeout = step_timeout_s
        self._max_length = max_length
        self._kl_coef = algorithm.kl_coef
        self._monitors = monitors
        self.advantages: FloatArray | None = None  # of the tokens of the last batch

    async def step(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on the batch, after which the actor's version is step + 1; return metrics.

        Raises NonFiniteError if the update was skipped, after which the version is still `step`.
        """
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                metrics = await self._step(batch, step)
        except TimeoutError:
            if not deadline.expired():  # an error of a worker
                raise
            workers = {
                worker.name: worker.waiting_for()
                for worker in (self._actor, self._critic, self._ref)
                if worker
            }
            pending = [
                f"worker {name!r} has not finished {', '.join(calls)}"
                for name, calls in workers.items()
                if calls
            ]
            problem = f"train step {step + 1} took longer than step_timeout_s = {self._timeout:g} s"
            raise StalledError("; ".join([problem, *pending])) from None
        if self._algorithm.kl_coef > 0:
            metrics["train/kl_coef"] = self._kl_coef
        measured = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if self._algorithm.kl_target is not None and "train/kl_reference" in measured:
            self._kl_coef = adapted(
                self._kl_coef, measured["train/kl_reference"], self._algorithm.kl_target
            )
        measured["reward/mean"] = mean_reward(batch)
        measured["rollout/row_tokens"] = float(batch.mask.sum()) / joined(batch).num_rows
        for monitor in self._monitors:
            monitor.check(measured, step)
        return metrics

    async def _step(self, batch: Batch, step: int) -> dict[str, float]:
        calls = [self._critic.call(Role.CRITIC, "values", batch)] if self._critic else []
        calls += [self._ref.call(Role.REF, "logprobs", batch)] if self._ref else []
        results = await asyncio.gather(*calls)
        batch = replace(batch, ref_logprobs=results[-1] if self._ref else None)
        batch = shape_rewards(batch, self._algorithm, self._max_length, self._kl_coef)
        values = results[0] if self._critic else None
        if isinstance(self._algorithm.advantage, Plugin):
            # Custom code runs on a thread: it must not block the loop, nor escape step_timeout_s.
            batch = await asyncio.to_thread(
                advantages, batch, self._algorithm, values, self._kl_coef
            )
        else:
            batch = advantages(batch, self._algorithm, values, self._kl_coef)
        self.advantages = batch.advantages
        updates = []
        if step >= self._algorithm.critic_warmup:
            updates.append(self._actor.start_call(Role.ACTOR, "update", batch, step, self._kl_coef))
        if self._critic and batch.mask.any():
            updates.append(self._critic.start_call(Role.CRITIC, "update", batch, step))
        metrics = advantage_metrics(batch)
        if self._algorithm.teacher is not None and batch.mask.any():
            metrics["distill/kl"] = float(kl_of_tokens(batch)[batch.mask].mean())
        for update in await asyncio.gather(*updates):
            metrics |= update
        if self._skipped:
            self._skipped.check(batch, step, metrics, self._kl_coef)
        return metrics

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """Return the trainer's state in a checkpoint, apart from the workers' weights."""
        return {"kl_coef": self._kl_coef}

    def load_state(self, state: dict[str, Any]) -> None:
        self._kl_coef = float(state["kl_coef"])

    async def save(self, folder: Path) -> None:
        for role, worker in self._workers():
            await worker.call(role, "save", str(folder))

    async def snapshot(self, folder: Path) -> None:
        """Copy the workers' state, which they then write to files beside their other work."""
        for role, worker in self._workers():
            await worker.call(role, "snapshot", str(folder))

    async def written(self) -> None:
        """Wait until the files of the last snapshot are written."""
        await asyncio.gather(
            *(worker.start_call(role, "written") for role, worker in self._workers())
        )

    async def load(self, folder: Path) -> None:
        for role, worker in self._workers():
            await worker.call(role, "load", str(folder))

    def _workers(self) -> list[tuple[Role, Worker]]:
        return [(Role.ACTOR, self._actor)] + ([(Role.CRITIC, self._critic)] if self._critic else [])


def mean_reward(batch: Batch) -> float:
    """Return the mean reward of a trajectory, with the rewards of its turns."""
    batch = joined(batch)
    turns = 0.0 if batch.token_rewards is None else float(batch.token_rewards.sum())
    return (float(batch.rewards.sum()) + turns) / batch.num_rows


def advantage_metrics(batch: Batch) -> dict[str, float]:
    """Return statistics of the advantages of trained tokens.

    Advantages below 1e-6 count as zero: rounding leaves such values where rewards are equal.
    """
    assert batch.advantages is not None
    trained = batch.advantages[batch.mask].astype(np.float64)
    if not len(trained):
        return {}
    return {
        "train/advantage_mean": float(trained.mean()),
        "train/advantage_std": float(trained.std()),
        "train/advantage_zero_fraction": float((np.abs(trained) < 1e-6).mean()),
    }
