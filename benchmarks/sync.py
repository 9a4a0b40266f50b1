"""Weight hand-over against the same bytes sent raw: from a trainer's process to engines in others, by every transport.

    python benchmarks/sync.py [--quick]

A hand-over is everything: the trainer's live tensors are gathered, sent, checked and swapped into each engine's live weights; the
figure beside it ends when every engine has all bytes, checked. Raw is one tensor of the same size through the same kind of pipe with
nothing around it: sendall and recv_into over TCP, one gloo broadcast, one copy into and out of shared memory. Medians of interleaved runs.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from paceline.place.local import ProcessWorker, available_cores, process_group
from paceline.place.message import Later
from paceline.place.worker import Worker
from paceline.rollout.service import RolloutService
from paceline.sync.collective import Collective
from paceline.sync.stream import Stream
from paceline.sync.transport import SharedMemory
from paceline.train.service import ActorService

RESULTS = Path(__file__).parent / "results" / "sync.json"
TRANSPORTS: dict[str, Any] = {"shared memory": SharedMemory, "stream": Stream, "collective": Collective}
MB = 1_000_000


def tensors(size: int) -> dict[str, Tensor]:
    """Like a model's: matrices of some MB and vectors in between, `size` bytes in all."""
    found: dict[str, Tensor] = {}
    matrix = torch.randn(1024, 1024)
    while (left := size - sum(t.nbytes for t in found.values())) > 0:
        found[f"layer.{len(found)}.weight"] = matrix[: max(1, min(1024, left // 4096))].clone()
    return found


class Trainer:
    """The parts of a train engine that the transport needs."""

    def __init__(self, size: int) -> None:
        self._tensors = tensors(size)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())


class Engine:
    """The parts of a rollout engine that the transport needs: weights that are replaced all at once."""

    has_work = False

    def __init__(self, size: int) -> None:
        self._tensors, self.version = tensors(size), -1

    def load(self, incoming: Any, version: int) -> None:
        for name, tensor in incoming:
            self._tensors[name].copy_(tensor)
        self.version = version


class Service(RolloutService):
    def await_weights(self, version: int) -> Later:
        """Answers once all of them are here."""
        receiver = self._receiver
        assert receiver
        return Later(lambda: receiver.done(version), lambda: None)


class Raw:
    """One tensor, through the pipes themselves."""

    def __init__(self, size: int) -> None:
        self._data = torch.zeros(size, dtype=torch.uint8)
        self._shared: Tensor | None = None
        self._socket = socket.create_server(("127.0.0.1", 0))

    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def send(self, ports: Sequence[int]) -> None:
        connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        view = self._data.numpy().data
        for start in range(0, len(view), 4 << 20):
            for connection in connections:
                connection.sendall(view[start : start + (4 << 20)])
        for connection in connections:
            connection.close()

    def receive(self) -> None:
        connection, _ = self._socket.accept()
        view, at = self._data.numpy().data, 0
        with connection:
            while at < len(view):
                at += connection.recv_into(view[at:])

    def map(self, path: str) -> None:
        self._shared = torch.from_file(path, shared=True, size=len(self._data), dtype=torch.uint8)

    def write(self) -> None:
        assert self._shared is not None
        self._shared.copy_(self._data)

    def read(self) -> None:
        assert self._shared is not None
        self._data.copy_(self._shared)

    def broadcast(self) -> None:
        dist.broadcast(self._data, 0)


def build_trainer(size: int) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    actor: Any = SimpleNamespace(engine=Trainer(size))
    return {"actor": ActorService(actor)}


def build_engine(size: int) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    engine: Any = Engine(size)
    return {"rollout": Service(engine)}


def build_raw(size: int) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    return {"raw": Raw(size)}


async def hand_over(transport: Any, size: int, count: int, repeats: int, logs: Path) -> list[dict[str, float]]:
    """Seconds until all bytes are there and checked, and until every engine has swapped them in."""
    options: dict[str, Any] = {"cores": [], "threads": 1}
    trainer = ProcessWorker("trainer", build_trainer, (size,), log_path=logs / "trainer.log", **options)
    engines = [ProcessWorker(f"e{n}", build_engine, (size,), log_path=logs / f"e{n}.log", **options) for n in range(count)]
    found = []
    try:
        await asyncio.gather(*(worker.ready() for worker in (trainer, *engines)))
        path = await transport.connect(trainer, engines)
        for version in range(repeats + 1):
            begun = time.perf_counter()
            weights = await path.publish(version)
            if transport is not SharedMemory:
                await asyncio.gather(*(arrived(engine, version) for engine in engines))
            there = time.perf_counter()
            await asyncio.gather(*(engine.call("rollout", "load_weights", weights) for engine in engines))
            found.append({"arrived_s": there - begun, "live_s": time.perf_counter() - begun})
    finally:
        await asyncio.gather(*(worker.close() for worker in (trainer, *engines)))
    return found[1:]  # the first one makes connections


async def arrived(engine: Worker, version: int) -> None:
    await engine.call("rollout", "await_weights", version)


async def raw_tcp(size: int, count: int, repeats: int, logs: Path) -> list[float]:
    workers = [ProcessWorker(f"raw{n}", build_raw, (size,), cores=[], threads=1, log_path=logs / f"raw{n}.log") for n in range(count + 1)]
    found = []
    try:
        await asyncio.gather(*(worker.ready() for worker in workers))
        sender, *receivers = workers
        ports = [await worker.call("raw", "port") for worker in receivers]
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            await asyncio.gather(sender.call("raw", "send", ports), *(worker.call("raw", "receive") for worker in receivers))
            found.append(time.perf_counter() - begun)
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))
    return found[1:]


async def raw_memory(size: int, count: int, repeats: int, logs: Path) -> list[float]:
    workers = [ProcessWorker(f"raw{n}", build_raw, (size,), cores=[], threads=1, log_path=logs / f"raw{n}.log") for n in range(count + 1)]
    found = []
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        try:
            await asyncio.gather(*(worker.ready() for worker in workers))
            await asyncio.gather(*(worker.call("raw", "map", file.name) for worker in workers))
            for _ in range(repeats + 1):
                begun = time.perf_counter()
                await workers[0].call("raw", "write")
                await asyncio.gather(*(worker.call("raw", "read") for worker in workers[1:]))
                found.append(time.perf_counter() - begun)
        finally:
            await asyncio.gather(*(worker.close() for worker in workers))
    return found[1:]


async def raw_gloo(size: int, count: int, repeats: int, logs: Path) -> list[float]:
    group = process_group("raw", build_raw, (size,), ranks=count + 1, threads=1, log_folder=logs)
    found = []
    try:
        await group.ready()
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            await group.call("raw", "broadcast")
            found.append(time.perf_counter() - begun)
    finally:
        await group.close()
    return found[1:]


RAW: dict[str, Any] = {"shared memory": raw_memory, "stream": raw_tcp, "collective": raw_gloo}


async def measure(size: int, counts: Sequence[int], rounds: int, repeats: int, logs: Path) -> list[dict[str, Any]]:
    rows = []
    for name, transport in TRANSPORTS.items():
        for count in counts:
            ours: list[dict[str, float]] = []
            raw: list[float] = []
            for _ in range(rounds):
                raw += await RAW[name](size, count, repeats, logs)
                ours += await hand_over(transport, size, count, repeats, logs)
            found = {key: statistics.median(run[key] for run in ours) for key in ours[0]}
            rows.append({"transport": name, "megabytes": size // MB, "engines": count, "raw_s": statistics.median(raw), **found})
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    for row in rows:
        row["ratio"], row["ratio_live"] = row["raw_s"] / row["arrived_s"], row["raw_s"] / row["live_s"]
        row["gb_per_s"] = row["megabytes"] * row["engines"] / 1000 / row["live_s"]
        same = [other for other in rows if (other["transport"], other["megabytes"]) == (row["transport"], row["megabytes"])]
        first = min(same, key=lambda other: other["engines"])
        if row["engines"] > first["engines"]:
            row["each_added_engine_s"] = (row["live_s"] - first["live_s"]) / (row["engines"] - first["engines"])
    return {
        "command": "python benchmarks/sync.py",
        "machine": f"{len(available_cores())} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"weights from one trainer to its engines, {report['machine']}")
    for column in ("transport", "MB", "engines", "raw s", "arrived s", "of raw", "live s", "of raw", "GB/s in all", "each added engine"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for row in report["rows"]:
        added = f"{row['each_added_engine_s'] * 1000:.0f} ms" if "each_added_engine_s" in row else ""
        table.add_row(
            row["transport"],
            f"{row['megabytes']:,}",
            str(row["engines"]),
            f"{row['raw_s']:.3f}",
            f"{row['arrived_s']:.3f}",
            f"{row['ratio']:.0%}",
            f"{row['live_s']:.3f}",
            f"{row['ratio_live']:.0%}",
            f"{row['gb_per_s']:.2f}",
            added,
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 MB only, once, nothing written")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    rows = []
    with tempfile.TemporaryDirectory() as logs:
        for size in (100 * MB,) if options.quick else (100 * MB, 1000 * MB):
            rounds = 1 if options.quick else 2
            rows += asyncio.run(measure(size, (1, 4), rounds, 3 if options.quick else 5, Path(logs)))
    report = summarize(rows)
    show(report)
    if not options.quick:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    from benchmarks.sync import main as run  # workers must find what is pickled by this module's own name

    run()
