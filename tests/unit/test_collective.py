"""Weight transfer by broadcast: members of the group receive, other engines fetch, and a failed
broadcast blocks no engine."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.remote.process import ProcessWorker
from paceline.rollout.service import RolloutService
from paceline.sync import collective
from paceline.sync.collective import Collective, CollectiveSource, CollectiveTarget
from paceline.sync.transport import SOURCE, TARGET
from paceline.sync.weights import Weights
from paceline.training.service import ActorService
from tests.fault_report import Fault
from tests.processes import children, listening

SHAPES = {"a": (1 << 20,), "b": (3, 5), "c": (1 << 20, 2)}


class Trainer:
    """Weights that are all equal and increase by 1 with every export."""

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

    def pid(self) -> int:
        return os.getpid()


def build_trainer() -> Mapping[str, Any]:
    collective.TIMEOUT_S = 5.0
    actor: Any = SimpleNamespace(engine=Trainer())
    return {SOURCE: ActorService(actor).weight_source}


def build_engine() -> Mapping[str, Any]:
    collective.TIMEOUT_S = 5.0
    engine: Any = Engine()
    rollout = Service(engine)
    return {"rollout": rollout, TARGET: rollout.weight_target}


@asynccontextmanager
async def started(
    folder: Path, count: int
) -> AsyncIterator[tuple[ProcessWorker, list[ProcessWorker]]]:
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


async def load(engines: list[ProcessWorker], weights: Weights) -> None:
    await asyncio.gather(*(engine.call("rollout", "load_weights", weights) for engine in engines))


async def sync(transport: Collective, engines: list[ProcessWorker], version: int) -> float:
    """Publish a version and return the value that all engines have then."""
    await load(engines, await transport.publish(version))
    found = [await engine.call("rollout", "values") for engine in engines]
    assert all(values == found[0] and len(values) == 1 for values in found), found
    return float(next(iter(found[0])))


async def members(engines: list[ProcessWorker]) -> list[bool]:
    in_group = CollectiveTarget.in_broadcast_group
    return [await engine.call(TARGET, "run", in_group) for engine in engines]


def test_engine_that_joins_fetches_and_is_in_next_broadcast_group(tmp_path: Path) -> None:
    async def check() -> None:
        async with started(tmp_path, 2) as (trainer, engines):
            transport = await Collective.connect(trainer, engines[:1])
            first = await sync(transport, engines[:1], 0)
            assert await members(engines[:1]) == [True]
            weights = await transport.publish(1)
            await transport.attach(engines[1])  # while the other one receives
            await load(engines, weights)
            assert await members(engines) == [True, False]
            values = [await engine.call("rollout", "values") for engine in engines]
            assert values == [{first + 1}] * 2
            assert await sync(transport, engines, 2) == first + 2
            assert await members(engines) == [True, True]
            assert listening(w.process.pid for w in (trainer, *engines)) == {"127.0.0.1"}

    asyncio.run(check())


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
@pytest.mark.fault("A4", "member of the broadcast group gets {how.name} before a weight sync")
def test_other_engines_get_weights_when_member_is_killed_or_suspended(
    how: signal.Signals, tmp_path: Path, fault: Fault
) -> None:
    async def check() -> None:
        async with started(tmp_path, 3) as (trainer, engines):
            transport = await Collective.connect(trainer, engines)
            first = await sync(transport, engines, 0)
            os.kill(engines[1].process.pid, how)
            fault.fired()
            others = [engines[0], engines[2]]
            async with asyncio.timeout(60):
                assert await sync(transport, others, 1) == first + 1
                fault.recovered()
                assert await sync(transport, others, 2) == first + 2
            assert await members(others) == [True, True], "no new group without the engine"
            if how is signal.SIGSTOP:
                os.kill(engines[1].process.pid, signal.SIGCONT)
                await transport.attach(engines[1])
                await load(engines, await transport.publish(3))
                assert await engines[1].call("rollout", "values") == {first + 3}

    asyncio.run(check())


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what ends the broadcasts of all groups; a group of epoch 1 fails to send then."""
    end = threading.Event()

    class Group:
        def __init__(self, store: Any, token: bytes, epoch: int, rank: int, size: int) -> None:
            self._fails = epoch == 1 and rank == 0

        def start(self, chunk: Tensor, send: bool) -> Any:
            return self._finish

        def _finish(self) -> None:
            assert end.wait(30)
            if self._fails:
                raise RuntimeError("a member did not respond")

    monkeypatch.setattr(collective, "BroadcastGroup", Group)
    return end


LAYOUT = [("a", (4,), "float32")]
TOKEN = bytes(32)


def test_trainer_keeps_newer_group_when_earlier_broadcast_fails_late(
    ending: threading.Event,
) -> None:
    source = CollectiveSource(LAYOUT, "127.0.0.1", TOKEN)
    source.join(epoch=1, size=2)
    source.write(iter([("a", torch.ones(4))]), 0)
    source.join(epoch=2, size=2)
    newer = source._broadcast_group
    ending.set()
    source._sender.join(30)
    assert newer is not None and source._broadcast_group is newer


def test_engine_keeps_newer_group_when_earlier_broadcast_ends_late(
    ending: threading.Event,
) -> None:
    target = CollectiveTarget(LAYOUT, "127.0.0.1", TOKEN)
    store = ("127.0.0.1", 1)
    target.join(store, epoch=1, rank=1, size=2)
    target.receive(0)
    target.join(store, epoch=2, rank=1, size=2)
    newer = target._broadcast_group
    ending.set()
    target._thread.join(30)
    assert newer is not None and target._broadcast_group is newer


def test_engine_stays_in_group_when_broadcast_ends(ending: threading.Event) -> None:
    target = CollectiveTarget(LAYOUT, "127.0.0.1", TOKEN)
    target.join(("127.0.0.1", 1), epoch=1, rank=1, size=2)
    target.receive(0)
    assert not target.in_broadcast_group()
    ending.set()
    target._thread.join(30)
    assert target.in_broadcast_group()
