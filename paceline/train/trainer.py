"""One train step, seen from the controller: values, advantages, then actor and critic update at the same time.

Knows the algorithm and who plays which role; knows nothing of back ends or schedules.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from paceline.algo.advantage import advantages
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import StalledError
from paceline.place.local import Worker
from paceline.types import Batch, Role


class Trainer:
    def __init__(
        self, actor: Worker, algorithm: AlgorithmSettings, step_timeout_s: float, critic: Worker | None = None, ref: Worker | None = None
    ) -> None:
        self._actor = actor
        self._critic = critic
        self._ref = ref
        self._algorithm = algorithm
        self._timeout = step_timeout_s

    async def step(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on the batch; afterwards the actor's version is step + 1."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._step(batch, step)
        except TimeoutError:
            raise StalledError(f"train step {step} took longer than step_timeout_s = {self._timeout:g} s") from None

    async def _step(self, batch: Batch, step: int) -> dict[str, float]:
        asked = [self._critic.call(Role.CRITIC, "values", batch)] if self._critic else []
        asked += [self._ref.call(Role.REF, "logprobs", batch)] if self._ref else []
        answers = await asyncio.gather(*asked)
        batch = replace(batch, ref_logprobs=answers[-1] if self._ref else None)
        batch = advantages(batch, self._algorithm, answers[0] if self._critic else None)
        updates = [self._actor.start_call(Role.ACTOR, "update", batch, step)]
        if self._critic:
            updates.append(self._critic.start_call(Role.CRITIC, "update", batch, step))
        results = await asyncio.gather(*updates)
        return {name: value for metrics in results for name, value in metrics.items()}

    async def save(self, folder: Path) -> None:
        for role, worker in self._workers():
            (folder / role).mkdir()
            await worker.call(role, "save", str(folder / role))

    async def load(self, folder: Path) -> None:
        for role, worker in self._workers():
            await worker.call(role, "load", str(folder / role))

    def _workers(self) -> list[tuple[Role, Worker]]:
        return [(Role.ACTOR, self._actor)] + ([(Role.CRITIC, self._critic)] if self._critic else [])
