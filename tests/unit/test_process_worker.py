"""Worker processes: what the run learns when one of them dies."""

import asyncio
import os
import resource
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WorkerDied
from paceline.remote.process import describe_exit
from tests.event_loops import in_loop
from tests.fault_report import Fault
from tests.processes import children, ignores, nohup, started


def fail() -> None:
    raise ValueError("cannot be unpickled")


class Unreadable:
    def __reduce__(self) -> Any:
        return fail, ()


class Part:
    def reply(self) -> Unreadable:
        return Unreadable()

    def status_of_process(self) -> str:
        """Return the status of a process that this one starts."""
        return subprocess.check_output(["cat", "/proc/self/status"], text=True)


def build() -> Mapping[str, Any]:
    return {"part": Part()}


@in_loop
async def test_worker_dies_with_reason_when_reply_cannot_be_unpickled(tmp_path: Path) -> None:
    async with started(build, tmp_path / "log", name="odd") as worker:
        with pytest.raises(WorkerDied, match="worker 'odd' died: ValueError: cannot be unpickled"):
            await worker.call("part", "reply")
    assert not children()


@in_loop
async def test_processes_of_worker_ignore_sighup_with_nohup_only(tmp_path: Path) -> None:
    for name, context in {"usual": nullcontext(), "nohup": nohup()}.items():
        with context:
            async with started(build, tmp_path / name) as worker:
                status = await worker.call("part", "status_of_process")
        assert ignores(signal.SIGHUP, status) == (name == "nohup")


@in_loop
async def test_worker_names_remedy_when_cpu_rejects_instruction(tmp_path: Path) -> None:
    async with started(build, tmp_path / "log", name="odd") as worker:
        worker.process.send_signal(signal.SIGILL)
        with pytest.raises(
            WorkerDied,
            match=r"worker 'odd' died \(killed by signal 4, SIGILL: .*use float32, or set "
            r"the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16\)",
        ):
            await worker.died


@contextmanager
def no_file_descriptors() -> Iterator[None]:
    """Take all file descriptors that this process may open."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))), limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


@in_loop
@pytest.mark.fault("F11", "worker killed while no file descriptors are left")
async def test_death_is_noticed_without_free_file_descriptors(tmp_path: Path, fault: Fault) -> None:
    async with started(build, tmp_path / "log") as worker:
        with no_file_descriptors():
            with pytest.raises(OSError, match="Too many open files"):
                os.open(os.devnull, os.O_RDONLY)
            worker.process.kill()
            fault.fired()
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await asyncio.shield(worker.died)
            fault.detected()


def test_exit_is_described_for_codes_and_signals() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by signal 9, SIGKILL"
    assert describe_exit(-50) == "killed by signal 50"
