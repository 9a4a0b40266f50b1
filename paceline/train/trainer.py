"""One train step, seen from the controller: values, rewards, advantages, then actor and critic update at the same time.

Knows the algorithm and who plays which role; knows nothing of back ends or schedules.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.algo.advantage import advantages
from paceline.algo.kl import adapted
from paceline.algo.settings import AlgorithmSettings
from paceline.algo.shaping import shape_rewards
from paceline.errors import StalledError
from paceline.observe.health import Health
from paceline.observe.mismatch import LIMITS, MismatchMonitor
from paceline.remote.worker import Worker
from paceline.types import Batch, Role


class Trainer:
    def __init__(
        self,
        actor: Worker,
        algorithm: AlgorithmSettings,
        step_timeout_s: float,
        critic: Worker | None = None,
        ref: Worker | None = None,
        max_length: int | None = None,
        mismatch_limit: float = LIMITS["float32"],
    ) -> None:
        """`max_length` is the longest answer that can be generated."""
        self._actor = actor
        self._critic = critic
        self._ref = ref
        self._algorithm = algorithm
        self._timeout = step_timeout_s
        self._max_length = max_length
        self._kl_coef = algorithm.kl_coef
        self._health, self._mismatch = Health(), MismatchMonitor(mismatch_limit)

    async def step(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on the batch; afterwards the actor's version is step + 1."""
        try:
            async with asyncio.timeout(self._timeout):
                metrics = await self._step(batch, step)
        except TimeoutError:
            workers = {
                worker.name: worker.waiting_for()
                for worker in (self._actor, self._critic, self._ref)
                if worker
            }
            silent = [
                f"worker {name!r} has not answered {', '.join(calls)}"
                for name, calls in workers.items()
                if calls
            ]
            what = f"train step {step + 1} took longer than step_timeout_s = {self._timeout:g} s"
            raise StalledError("; ".join([what, *silent])) from None
        if self._algorithm.kl_coef > 0:
            metrics["train/kl_coef"] = self._kl_coef
        if self._algorithm.kl_target is not None and "train/kl_reference" in metrics:
            self._kl_coef = adapted(
                self._kl_coef, metrics["train/kl_reference"], self._algorithm.kl_target
            )
        self._health.check(metrics, step)
        self._mismatch.check(metrics, step)
        return metrics

    async def _step(self, batch: Batch, step: int) -> dict[str, float]:
        asked = [self._critic.call(Role.CRITIC, "values", batch)] if self._critic else []
        asked += [self._ref.call(Role.REF, "logprobs", batch)] if self._ref else []
        answers = await asyncio.gather(*asked)
        batch = replace(batch, ref_logprobs=answers[-1] if self._ref else None)
        batch = shape_rewards(batch, self._algorithm, self._max_length, self._kl_coef)
        batch = advantages(batch, self._algorithm, answers[0] if self._critic else None)
        updates = []
        if step >= self._algorithm.critic_warmup:
            updates.append(self._actor.start_call(Role.ACTOR, "update", batch, step, self._kl_coef))
        if self._critic and batch.mask.any():
            updates.append(self._critic.start_call(Role.CRITIC, "update", batch, step))
        results = await asyncio.gather(*updates)
        return advantage_metrics(batch) | {
            name: value for metrics in results for name, value in metrics.items()
        }

    # -- what a checkpoint keeps

    def state(self) -> dict[str, Any]:
        """What the trainer itself has learned, apart from the workers' weights."""
        return {"kl_coef": self._kl_coef}

    def load_state(self, state: dict[str, Any]) -> None:
        self._kl_coef = float(state["kl_coef"])

    async def save(self, folder: Path) -> None:
        for role, worker in self._workers():
            (folder / role).mkdir()
            await worker.call(role, "save", str(folder / role))

    async def load(self, folder: Path) -> None:
        for role, worker in self._workers():
            await worker.call(role, "load", str(folder / role))

    def _workers(self) -> list[tuple[Role, Worker]]:
        return [(Role.ACTOR, self._actor)] + ([(Role.CRITIC, self._critic)] if self._critic else [])


def advantage_metrics(batch: Batch) -> dict[str, float]:
    """Over trained tokens. Zero means too small to teach: rounding leaves near-zeros where rewards are equal."""
    assert batch.advantages is not None
    trained = batch.advantages[batch.mask].astype(np.float64)
    if not len(trained):
        return {}
    return {
        "train/advantage_mean": float(trained.mean()),
        "train/advantage_std": float(trained.std()),
        "train/advantage_zero_fraction": float((np.abs(trained) < 1e-6).mean()),
    }
