"""Weights by broadcast: whoever is in the circle gets them that way, everybody else fetches, and a broken circle stops nobody."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.remote.process import ProcessWorker
from paceline.remote.worker import Worker
from paceline.rollout.service import RolloutService
from paceline.sync import collective
from paceline.sync.collective import Collective
from paceline.train.service import ActorService
from tests.processes import children

SHAPES = {"a": (1 << 20,), "b": (3, 5), "c": (1 << 20, 2)}


class Trainer:
    """Weights that count their versions."""

    def __init__(self) -> None:
        self._tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tensor.add_(1)


class Engine:
    has_work = False

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}

    def load(self, tensors: Any, version: int) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in tensors}


class Service(RolloutService):
    def values(self) -> set[float]:
        engine: Any = self._engine
        assert set(engine.loaded) == set(SHAPES)
        return {float(value) for tensor in engine.loaded.values() for value in tensor.unique()}

    def in_broadcast_group(self) -> bool:
        receiver: Any = self._receiver
        return bool(receiver.in_broadcast_group)

    def pid(self) -> int:
        return os.getpid()


def build_trainer() -> Mapping[str, Any]:
    collective.TIMEOUT_S = 2.0
    actor: Any = SimpleNamespace(engine=Trainer())
    return {"actor": ActorService(actor)}


def build_engine() -> Mapping[str, Any]:
    collective.TIMEOUT_S = 2.0
    engine: Any = Engine()
    return {"rollout": Service(engine)}


@asynccontextmanager
async def started(folder: Path, count: int) -> AsyncIterator[tuple[Worker, list[ProcessWorker]]]:
    def start(name: str, build: Any) -> ProcessWorker:
        return ProcessWorker(name, build, (), cores=[], threads=1, log_path=folder / f"{name}.log")

    workers = [
        start("trainer", build_trainer),
        *(start(f"engine {number}", build_engine) for number in range(count)),
    ]
    try:
        await asyncio.gather(*(worker.ready() for worker in workers))
        yield workers[0], workers[1:]
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))
        assert not children()


async def hand_over(transport: Collective, engines: list[ProcessWorker], version: int) -> None:
    weights = await transport.publish(version)
    await asyncio.gather(*(engine.call("rollout", "load_weights", weights) for engine in engines))


def test_engines_of_the_circle_get_every_version_and_one_that_joins_fetches_and_is_in_the_next(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with started(tmp_path, 3) as (trainer, engines):
            transport = await Collective.connect(trainer, engines[:2])
            first = await value(transport, engines[:2], 0)
            assert [
                await engine.call("rollout", "in_broadcast_group") for engine in engines[:2]
            ] == [
                True,
                True,
            ]
            weights = await transport.publish(1)
            await transport.attach(engines[2])  # while the others receive
            await asyncio.gather(
                *(engine.call("rollout", "load_weights", weights) for engine in engines)
            )
            assert [await engine.call("rollout", "in_broadcast_group") for engine in engines] == [
                True,
                True,
                False,
            ]
            assert [await engine.call("rollout", "values") for engine in engines] == [
                {first + 1}
            ] * 3
            assert await value(transport, engines, 2) == first + 2
            assert [await engine.call("rollout", "in_broadcast_group") for engine in engines] == [
                True,
                True,
                True,
            ]

    asyncio.run(check())


async def value(transport: Collective, engines: list[ProcessWorker], version: int) -> float:
    """What all engines have after a hand-over."""
    await hand_over(transport, engines, version)
    found = [await engine.call("rollout", "values") for engine in engines]
    assert all(values == found[0] and len(values) == 1 for values in found), found
    return next(iter(found[0]))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_stops_in_the_circle_keeps_no_other_from_the_weights(
    blow: signal.Signals, tmp_path: Path
) -> None:
    async def check() -> None:
        async with started(tmp_path, 3) as (trainer, engines):
            transport = await Collective.connect(trainer, engines)
            first = await value(transport, engines, 0)
            os.kill(engines[1].process.pid, blow)
            others = [engines[0], engines[2]]
            async with asyncio.timeout(20):
                assert await value(transport, others, 1) == first + 1
                assert await value(transport, others, 2) == first + 2
            assert [await engine.call("rollout", "in_broadcast_group") for engine in others] == [
                True,
                True,
            ], "a new circle without it"
            if blow is signal.SIGSTOP:
                os.kill(engines[1].process.pid, signal.SIGCONT)
                await transport.attach(engines[1])
                weights = await transport.publish(3)
                await asyncio.gather(
                    *(engine.call("rollout", "load_weights", weights) for engine in engines)
                )
                assert await engines[1].call("rollout", "values") == {first + 3}

    asyncio.run(check())
