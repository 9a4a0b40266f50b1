"""Ranks of one engine: the same operations in the same order, whatever else the ranks do."""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import SyncError
from paceline.remote.group import WorkerGroup
from paceline.remote.process import process_group
from paceline.rollout.tensor_parallel import AllRanks, Follower, InOrder, Team

WEIGHT = torch.arange(8, dtype=torch.float32).reshape(2, 4)


class RecordingRank:
    """An engine rank that records its operations. A step ends when all ranks are in it."""

    def __init__(self) -> None:
        self.record: list[str] = []
        self.loaded: dict[str, list[float]] = {}

    def add(self, request_id: str, prompt: Any, salt: str, params: Any) -> None:
        self.record.append(f"add {request_id}")

    def step(self) -> list[Any]:
        steps = torch.tensor(float(self.record.count("step")))
        dist.all_reduce(steps)
        assert steps == 2 * self.record.count("step"), "ranks are in different steps"
        self.record.append("step")
        return []

    def abort(self, request_ids: Any) -> None:
        self.record.append(f"abort {request_ids}")

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name == f"fails on {dist.get_rank()}":
                raise ValueError("wrong shape")
            half = dist.get_rank() * 2
            self.loaded[name] = tensor[:, half : half + 2].flatten().tolist()

    def sleep(self) -> None:
        self.record.append("sleep")

    def wake(self) -> None:
        self.record.append("wake")


class Leader:
    """A part that steps between calls, as an engine with work does."""

    def __init__(self, own: RecordingRank, team: Team) -> None:
        self._ranks, self._steps, self._released = AllRanks(own, team), 0, False

    def begin(self, steps: int) -> None:
        self._ranks.add("a", (1, 2), "0", None)
        self._steps = steps

    def work(self) -> list[Any] | None:
        if not self._steps:
            return None
        self._steps -= 1
        self._ranks.step()
        return []

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._ranks.sleep()

    def load(self, names: list[str], path: str | None) -> None:
        size = WEIGHT.numel()
        block = torch.from_file(path, True, size) if path else torch.empty(size)
        block.copy_(WEIGHT.flatten())
        self._ranks.load({name: block.view(2, 4) for name in names}.items())

    def received(self) -> dict[int, int]:
        """Return the bytes that each follower received in the last load."""
        return self._ranks.received


class Trainer:
    """A part that all ranks call, with a collective operation."""

    def __init__(self, own: RecordingRank, release: Callable[[], None]) -> None:
        self._own, self._release = own, release

    def train(self) -> None:
        self._release()
        dist.barrier()
        self._own.record.append("train")

    def ranks_state(self) -> list[Any]:
        """Return the operations and the weights of each rank."""
        found: list[Any] = [None, None]
        dist.all_gather_object(found, (self._own.record, self._own.loaded))
        return found


def build() -> Mapping[str, Any]:
    torch.set_num_threads(1)
    own, team = RecordingRank(), Team(2)
    if team.leads:
        leader = Leader(own, team)
        return {"engine": leader, "trainer": InOrder(Trainer(own, leader.release), team.post_call)}
    follower = Follower(own, team)
    trainer = InOrder(Trainer(own, follower.release), follower.await_call)
    return {"engine": follower, "trainer": trainer}


Scenario = Callable[[WorkerGroup], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def with_group() -> Iterator[Callable[[Scenario], None]]:
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:

        async def start() -> WorkerGroup:
            group = process_group(
                "ranks",
                build,
                (),
                ranks=2,
                threads=1,
                log_folder=Path(folder),
                first_only={"engine"},
            )
            await group.ready()
            return group

        async def limited(scenario: Scenario) -> None:
            async with asyncio.timeout(60):
                await scenario(group)

        group = runner.run(start())
        yield lambda scenario: runner.run(limited(scenario))
        runner.run(group.close())


def test_ranks_perform_steps_and_calls_in_one_order(with_group: Any) -> None:
    async def scenario(group: WorkerGroup) -> None:
        await group.call("engine", "begin", 500)
        for _ in range(20):
            await asyncio.gather(*(group.call("trainer", "train") for _ in range(5)))
        (leader, _), (follower, _) = await group.call("trainer", "ranks_state")
        assert leader == follower
        assert leader[0] == "add a" and leader.count("train") == 100 and leader.count("sleep") == 1
        assert 0 < leader.index("step") < len(leader) - 1

    with_group(scenario)


@pytest.mark.parametrize("shared", [True, False], ids=["file", "network"])
def test_each_rank_gets_only_its_shard(with_group: Any, tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(WEIGHT.nbytes))

    async def scenario(group: WorkerGroup) -> None:
        for names in (["v", "w"], ["v", "w"], ["w"]):  # the last one is another layout
            await group.call("engine", "load", names, str(path) if shared else None)
            (_, first), (_, second) = await group.call("trainer", "ranks_state")
            for name in names:
                assert first[name] == WEIGHT[:, :2].flatten().tolist()
                assert second[name] == WEIGHT[:, 2:].flatten().tolist()
            received = 0 if shared else len(names) * WEIGHT.nbytes // 2
            assert await group.call("engine", "received") == {1: received}

    with_group(scenario)


@pytest.mark.parametrize("rank", [0, 1])
def test_load_fails_on_all_ranks_and_succeeds_later(with_group: Any, rank: int) -> None:
    async def scenario(group: WorkerGroup) -> None:
        with pytest.raises((SyncError, ValueError), match="wrong shape"):
            await group.call("engine", "load", ["w", f"fails on {rank}", "x"], None)
        await group.call("engine", "load", ["later"], None)
        assert all("later" in loaded for _, loaded in await group.call("trainer", "ranks_state"))

    with_group(scenario)
