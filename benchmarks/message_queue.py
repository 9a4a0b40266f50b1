"""The message queue between processes: groups of 8 answers of 512 tokens from rollouters to trainer ranks, on two cores.

    python benchmarks/message_queue.py [--quick]

Everything counts: encoding, the way to the queue's process, its books (keys, versions, leases), the way out, decoding. Beside it the
same with groups pickled, and the limit: as many bytes over the same two sockets by blocking sendall and recv_into, with nothing
around them. Medians of interleaved runs. (Named so because a `queue.py` here would hide Python's own from every script beside it.)
"""

import argparse
import asyncio
import json
import os
import pickle
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from paceline.queue.remote import QueueServer, RemoteQueueClient
from paceline.queue.wire import decode, encode

from paceline.queue import remote
from paceline.queue.message_queue import MessageQueue, Producer
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn

RESULTS = Path(__file__).parent / "results" / "message_queue.json"
ATTEMPTS, TOKENS, PROMPT = 8, 512, 128
TAKE, WINDOW, HELD = (
    16,
    8,
    256,
)  # groups per get; puts under way per producer; groups the queue holds
TOKEN = "benchmark"
SHAPES = [(1, 1), (2, 1), (2, 2)]  # producers, takers


def make_group(seq: int) -> Group:
    rng = np.random.default_rng(0)
    prompt = tuple(range(PROMPT))
    answers = [
        Completion(
            rng.integers(0, 150_000, TOKENS, np.int32),
            -rng.random(TOKENS, np.float32),
            np.full(TOKENS, 3, np.int32),
            Finish.STOP,
        )
        for _ in range(ATTEMPTS)
    ]
    trajectories = tuple(
        Trajectory((Turn(prompt, answer),), "word " * TOKENS, 1.0) for answer in answers
    )
    return Group(
        seq,
        Prompt(f"train.jsonl:{seq}", prompt, "text " * PROMPT, {"answer": "42"}),
        trajectories,
        0.0,
        1.0,
    )


# --- the processes ---


async def produce(address: str, name: str, first: int, step: int, count: int) -> None:
    client = await RemoteQueueClient.connect(address, TOKEN, Producer(name))
    group, free = make_group(0), asyncio.Semaphore(WINDOW)

    async def put(seq: int) -> None:
        try:
            await client.put_samples(
                Group(seq, group.prompt, group.trajectories, 0.0, 1.0), 3, wait=True
            )
        finally:
            free.release()

    async with asyncio.TaskGroup() as tasks:
        for seq in range(first, count, step):
            await free.acquire()
            tasks.create_task(put(seq))
    await client.close()


async def take(address: str, count: int) -> None:
    """Prints when each batch was in hand."""
    client = await RemoteQueueClient.connect(address, TOKEN)
    times = []
    for _ in range(count // TAKE):
        groups = await client.get_samples(TAKE, current_param_version=3)
        assert (
            sum(len(trajectory.turns[0].completion) for trajectory in groups[-1].trajectories)
            == ATTEMPTS * TOKENS
        )
        await client.acknowledge()
        times.append(time.monotonic())
    print(json.dumps(times))
    await client.close()


def start(*args: object, pass_fds: tuple[int, ...] = ()) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, __file__, "--part", json.dumps(args)],
        stdout=subprocess.PIPE,
        pass_fds=pass_fds,
    )


async def measure_queue(producers: int, takers: int, count: int, pickled: bool) -> float:
    """Groups a second, without the first quarter."""
    with tempfile.TemporaryDirectory() as folder:
        server = await QueueServer.open(MessageQueue(HELD, 3), f"unix:{folder}/queue", TOKEN)
        processes = [start("take", pickled, server.address, count // takers) for _ in range(takers)]
        putting = [
            start("produce", pickled, server.address, f"rollout-{n}", n, producers, count)
            for n in range(producers)
        ]
        outputs = await asyncio.gather(
            *(asyncio.to_thread(process.communicate) for process in processes)
        )
        for process in [*processes, *putting]:
            assert await asyncio.to_thread(process.wait) == 0
        await server.close()
    times = sorted(moment for output, _ in outputs for moment in json.loads(output))
    steady = times[len(times) // 4 :]
    return (len(steady) - 1) * TAKE / (steady[-1] - steady[0])


def measure_raw(size: int, count: int) -> float:
    """The same bytes a second time round: one process to this one, this one to another; frames a second."""
    incoming, theirs_in = socket.socketpair()
    outgoing, theirs_out = socket.socketpair()
    for end in (incoming, theirs_in, outgoing, theirs_out):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    sender = start("send", size, count, theirs_in.fileno(), pass_fds=(theirs_in.fileno(),))
    receiver = start("receive", size, count, theirs_out.fileno(), pass_fds=(theirs_out.fileno(),))
    theirs_in.close()
    theirs_out.close()
    frame = bytearray(size)
    times = []
    for _ in range(count):
        receive_all(incoming, frame)
        outgoing.sendall(frame)
        times.append(time.monotonic())
    for process in (sender, receiver):
        process.communicate()
    incoming.close()
    outgoing.close()
    steady = times[count // 4 :]
    return (len(steady) - 1) / (steady[-1] - steady[0])


def receive_all(source: socket.socket, frame: bytearray) -> None:
    view = memoryview(frame)
    while view:
        view = view[source.recv_into(view) :]


def part(kind: str, *args: Any) -> None:
    if kind in ("send", "receive"):
        size, count, descriptor = args
        with socket.socket(fileno=descriptor) as end:
            frame = bytearray(size)
            for _ in range(count):
                end.sendall(frame) if kind == "send" else receive_all(end, frame)
        return
    pickled, *rest = args
    if pickled:
        remote.encode, remote.decode = lambda group: pickle.dumps(group, 5), pickle.loads  # type: ignore[assignment]
    asyncio.run(produce(*rest) if kind == "produce" else take(*rest))


# --- the report ---


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short repetition, nothing written"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part(*json.loads(options.part))
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    repeats, count = (1, 1024) if options.quick else (5, 8192)
    size = len(encode(make_group(0)))
    runs: dict[str, list[float]] = {}
    for _ in range(repeats):
        for producers, takers in SHAPES:
            for way in ("flat arrays", "pickled"):
                figure = asyncio.run(measure_queue(producers, takers, count, way == "pickled"))
                runs.setdefault(f"{producers} → {takers}, {way}", []).append(figure)
        runs.setdefault("limit: raw bytes, 1 → 1", []).append(measure_raw(size, count))
    report = {
        "command": "python benchmarks/message_queue.py",
        "machine": f"2 cores, {platform.machine()}, Python {platform.python_version()}",
        "work": f"groups of {ATTEMPTS} x {TOKENS} tokens, {size:,} bytes each; {TAKE} taken at a time",
        "bytes": size,
        "groups_per_s": {name: statistics.median(figures) for name, figures in runs.items()},
        "all": {name: [round(figure) for figure in figures] for name, figures in runs.items()},
        "coding_us": coding(),
    }
    show(report)
    if not options.quick:
        RESULTS.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def coding() -> dict[str, float]:
    """Microseconds for one group, in this process."""
    group = make_group(0)
    ways: dict[str, Any] = {
        "encode": lambda: encode(group),
        "pickle.dumps": lambda: pickle.dumps(group, 5),
    }
    flat, pickled = encode(group), pickle.dumps(group, 5)
    ways |= {"decode": lambda: decode(flat), "pickle.loads": lambda: pickle.loads(pickled)}
    found = {}
    for name, work in ways.items():
        started = time.perf_counter()
        for _ in range(500):
            work()
        found[name] = round((time.perf_counter() - started) / 500 * 1e6, 1)
    return found


def show(report: dict[str, Any]) -> None:
    limit = report["groups_per_s"]["limit: raw bytes, 1 → 1"]
    table = Table(title=report["work"])
    for column in ("producers → takers", "groups/s", "tokens/s", "MB/s", "of the limit"):
        table.add_column(column, justify="left" if column.startswith("producers") else "right")
    for name, figure in report["groups_per_s"].items():
        row = (
            f"{figure:,.0f}",
            f"{figure * ATTEMPTS * TOKENS:,.0f}",
            f"{figure * report['bytes'] / 1e6:,.0f}",
            f"{figure / limit:.0%}",
        )
        table.add_row(name, *row)
    console = Console(width=120)
    console.print(table)
    console.print(
        "µs for one group: "
        + ", ".join(f"{name} {figure:g}" for name, figure in report["coding_us"].items()),
        highlight=False,
    )


if __name__ == "__main__":
    main()
