"""Weight sync between processes by every transport, compared with a raw transfer of the same bytes.

    python benchmarks/sync.py [--quick]

A weight sync is the whole operation: the trainer's live tensors are gathered, sent and verified
("arrived"), then swapped into the live weights of each engine ("live"). The raw transfer moves one
tensor of the same size and does nothing else: sendall and recv_into over TCP, one gloo broadcast,
or one copy into and out of shared memory. Both run interleaved in the same processes; results are
medians.
"""

import asyncio
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.report import RESULTS, command_line, origin, write
from paceline.remote.group import use_interface
from paceline.remote.message import Deferred
from paceline.remote.process import ProcessWorker
from paceline.rollout.service import RolloutService
from paceline.sync.collective import Collective
from paceline.sync.shared_memory import SharedMemory
from paceline.sync.stream import Stream
from paceline.sync.transport import SOURCE, TARGET, WeightSource
from paceline.workers.cluster import available_cores

TRANSPORTS: dict[str, Any] = {
    "shared memory": SharedMemory,
    "stream": Stream,
    "collective": Collective,
}
MB = 1_000_000
TENSOR = 1 << 20  # elements per tensor
GLOO_TIMEOUT = timedelta(seconds=60)
dist: Any = torch.distributed

Workers = tuple[ProcessWorker, list[ProcessWorker]]


class Model:
    """Stand-in for the train engine and the rollout engine.

    Its weights are in one block of memory, which the raw transfers use too.
    """

    has_work = False

    def __init__(self, size: int) -> None:
        self.flat = torch.randn(size // 4)
        self._tensors = {
            f"layer.{number}.weight": part for number, part in enumerate(self.flat.split(TENSOR))
        }

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def load(self, incoming: Any, version: int) -> None:
        for name, tensor in incoming:
            self._tensors[name].copy_(tensor)


class Engine(RolloutService):
    def await_weights(self, version: int) -> Deferred:
        """Reply once all weights have arrived."""
        end: Any = self.weight_target._end
        return Deferred(lambda: end.done(version), lambda: None)

    def forget(self) -> None:
        """Remove the end of a transport, so that another one can connect."""
        self.weight_target._end = None


class Raw:
    """Raw transfers over TCP, shared memory and gloo."""

    def __init__(self, data: Tensor) -> None:
        self._data = data.view(torch.uint8)
        self._shared: Tensor | None = None
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._stores: list[Any] = []  # a process group does not keep its store alive
        self._group: Any = None

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

    def store(self) -> int:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        return int(store.port)

    def join(self, port: int, rank: int, size: int) -> None:
        use_interface("127.0.0.1")
        self._stores.append(dist.TCPStore("127.0.0.1", port, is_master=False))
        self._group = dist.ProcessGroupGloo(self._stores[-1], rank, size, GLOO_TIMEOUT)

    def broadcast(self) -> None:
        """Broadcast the data of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([self._data], options).wait()


def build(size: int, role: str) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    model: Any = Model(size)
    raw = {"raw": Raw(model.flat)}
    if role == "actor":
        return raw | {SOURCE: WeightSource(model.export_weights)}
    engine = Engine(model)
    return raw | {role: engine, TARGET: engine.weight_target}


async def raw_stream(workers: Workers, size: int) -> Callable[[], Awaitable[Any]]:
    trainer, engines = workers
    ports = [await engine.call("raw", "port") for engine in engines]
    return lambda: asyncio.gather(
        trainer.call("raw", "send", ports), *(engine.call("raw", "receive") for engine in engines)
    )


async def raw_memory(workers: Workers, size: int) -> Callable[[], Awaitable[Any]]:
    trainer, engines = workers
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        await asyncio.gather(
            *(worker.call("raw", "map", file.name) for worker in (trainer, *engines))
        )

    async def copy() -> None:
        await trainer.call("raw", "write")
        await asyncio.gather(*(engine.call("raw", "read") for engine in engines))

    return copy


async def raw_collective(workers: Workers, size: int) -> Callable[[], Awaitable[Any]]:
    trainer, engines = workers
    port = await trainer.call("raw", "store")
    workers_by_rank = [trainer, *engines]
    await asyncio.gather(
        *(
            worker.call("raw", "join", port, rank, len(workers_by_rank))
            for rank, worker in enumerate(workers_by_rank)
        )
    )
    return lambda: asyncio.gather(*(worker.call("raw", "broadcast") for worker in workers_by_rank))


RAW = {"shared memory": raw_memory, "stream": raw_stream, "collective": raw_collective}


async def measure(name: str, workers: Workers, size: int, repeats: int) -> dict[str, Any]:
    trainer, engines = workers
    send_raw = await RAW[name](workers, size)
    await asyncio.gather(*(engine.call("rollout", "forget") for engine in engines))
    transport = await TRANSPORTS[name].connect(trainer, engines)
    found: dict[str, list[float]] = {"raw_s": [], "arrived_s": [], "live_s": []}
    for version in range(repeats + 1):
        begun = time.perf_counter()
        await send_raw()
        sent = time.perf_counter()
        weights = await transport.publish(version)
        if name != "shared memory":  # shared memory is read when it is loaded
            await asyncio.gather(
                *(engine.call("rollout", "await_weights", version) for engine in engines)
            )
        arrived = time.perf_counter()
        await asyncio.gather(
            *(engine.call("rollout", "load_weights", weights) for engine in engines)
        )
        live = time.perf_counter()
        found["raw_s"].append(sent - begun)
        found["arrived_s"].append((live if name == "shared memory" else arrived) - sent)
        found["live_s"].append(live - sent)
    # the first sync also connects
    medians = {key: statistics.median(values[1:]) for key, values in found.items()}
    return {"transport": name, "megabytes": size // MB, "engines": len(engines), **medians}


async def measure_all(size: int, count: int, repeats: int, logs: Path) -> list[dict[str, Any]]:
    def start(name: str, role: str) -> ProcessWorker:
        return ProcessWorker(
            name, build, (size, role), cores=[], threads=1, log_path=logs / f"{name}.log"
        )

    workers = (
        start("trainer", "actor"),
        [start(f"engine{number}", "rollout") for number in range(count)],
    )
    try:
        await asyncio.gather(*(worker.ready() for worker in (workers[0], *workers[1])))
        return [await measure(name, workers, size, repeats) for name in TRANSPORTS]
    finally:
        await asyncio.gather(*(worker.close() for worker in (workers[0], *workers[1])))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    for row in rows:
        row["ratio"], row["ratio_live"] = (
            row["raw_s"] / row["arrived_s"],
            row["raw_s"] / row["live_s"],
        )
        row["gb_per_s"] = row["megabytes"] * row["engines"] / 1000 / row["live_s"]
        same = [
            other
            for other in rows
            if (other["transport"], other["megabytes"]) == (row["transport"], row["megabytes"])
        ]
        first = min(same, key=lambda other: other["engines"])
        if row["engines"] > first["engines"]:
            row["each_added_engine_s"] = (row["live_s"] - first["live_s"]) / (
                row["engines"] - first["engines"]
            )
    return origin() | {
        "machine": f"{len(available_cores())} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"weights from one trainer to its engines, {report['machine']}")
    for column in (
        "transport",
        "MB",
        "engines",
        "raw s",
        "arrived s",
        "% of raw",
        "live s",
        "% of raw",
        "GB/s in total",
        "per added engine",
    ):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for row in report["rows"]:
        added = (
            f"{row['each_added_engine_s'] * 1000:.0f} ms" if "each_added_engine_s" in row else ""
        )
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
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="100 MB only, no file written")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    rows = []
    with tempfile.TemporaryDirectory() as logs:
        for size, repeats in (
            ((100 * MB, 9),) if options.quick else ((100 * MB, 15), (1000 * MB, 7))
        ):
            for count in (1, 4):
                rows += asyncio.run(measure_all(size, count, repeats, Path(logs)))
    rows.sort(
        key=lambda row: (list(TRANSPORTS).index(row["transport"]), row["megabytes"], row["engines"])
    )
    report = summarize(rows)
    show(report)
    if not options.quick:
        write(RESULTS / "sync.json", report)


if __name__ == "__main__":
    # workers unpickle objects of this module by its import name, not as __main__
    from benchmarks import sync

    sync.main()
