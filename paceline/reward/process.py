"""Pool of worker processes for a custom reward function.

Each call has a deadline. A call that exceeds its deadline kills its process and all descendants;
the pool starts a replacement and the run continues.
"""

import asyncio
import json
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RewardError
from paceline.types import Prompt, Score, Trajectory

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # a reward function may import torch
PIPE_BYTES = 32 * 1024  # fits into the buffer of any pipe
POLL_INTERVAL_S = 0.5
EXIT_TIMEOUT_S = 1.0  # lets a worker flush its files when the pool closes

Children = dict[int, list[int]]  # process ID -> IDs of its children


class Worker:
    """One process that holds the function and scores one completion after another."""

    def __init__(self, function: str) -> None:
        self.function = function
        self._ready = False
        self._connection, remote = Pipe()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline.reward.worker",
                str(remote.fileno()),
                str(os.getpid()),
                function,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[remote.fileno()],
            start_new_session=True,  # a separate process group can be killed as a whole
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        remote.close()
        threading.Thread(target=self._relay, daemon=True, name="reward-output").start()

    def wait_ready(self) -> None:
        """Wait until the function is loaded. Raises ConfigError if it cannot be loaded."""
        if self._ready:
            return
        message = self._receive(START_TIMEOUT_S, f"loading reward {self.function!r}", "to load")
        if "problem" in message:
            raise ConfigError(f"reward.function = {self.function!r}: {message['problem']}")
        self._ready = True

    def score(
        self, completions: Sequence[str], row: Mapping[str, Any], uid: str, timeout_s: float
    ) -> list[Score]:
        """Score completions one after another, each with a separate deadline.

        All are sent at once if the pipe can hold them without a reader, which saves round trips.
        """
        what = f"reward {self.function!r}, prompt {uid!r}"
        self.wait_ready()
        requests = [pickle.dumps((completion, dict(row))) for completion in completions]
        together = sum(map(len, requests)) <= PIPE_BYTES
        replies = []
        for number, request in enumerate(requests):
            with suppress(BrokenPipeError):  # the worker has died; _receive reports it
                for outgoing in (requests if number == 0 else ()) if together else (request,):
                    self._connection.send_bytes(outgoing)
            replies.append(self._receive(timeout_s, what, "(reward.timeout_s)"))
        for reply in replies:
            if "problem" in reply:
                raise RewardError(f"{what}: {reply['problem']}")
        return [reply["reward"] for reply in replies]

    def disconnect(self) -> None:
        """Close the connection, so that an idle worker exits normally and flushes its files."""
        self._connection.close()

    def finish(self, children: Children) -> None:
        """Wait briefly for a disconnected worker to exit, then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT_S)
        self.kill(children)

    def kill(self, children: Children | None = None) -> None:
        children = _all_children() if children is None else children
        descendants = _descendants(self.process.pid, children)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _receive(self, timeout_s: float, what: str, limit: str) -> dict[str, Any]:
        try:
            if not self._replies_within(timeout_s):
                raise _Lost(
                    f"{what}: no reply within {timeout_s:g} s {limit}; its process was killed"
                )
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as e:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_TIMEOUT_S)
            raise _Dead(f"{what}: its process ended with {_exit(self.process.returncode)}") from e
        return message

    def _replies_within(self, timeout_s: float) -> bool:
        """Return whether a reply arrives in time.

        Time in which this process is suspended (Ctrl-Z, SIGSTOP) does not count, because the worker
        may have been suspended too.
        """
        while timeout_s > 0:
            waited = min(POLL_INTERVAL_S, timeout_s)
            if self._connection.poll(waited):
                return True
            timeout_s -= waited
        return False

    def _relay(self) -> None:
        """Copy the function's output to the log."""
        assert self.process.stdout is not None
        with self.process.stdout as output, suppress(ValueError, OSError):
            while line := output.readline(4096):
                log.info("reward output: %s", line.decode(errors="replace").rstrip())


class _Lost(RewardError):
    """The worker hangs or has exited."""


class _Dead(_Lost):
    """The worker has exited. The cause may be external (the OOM killer), so a retry can succeed."""


class ProcessReward:
    """The pool as a Reward. One thread per worker waits for it, so the event loop never blocks."""

    def __init__(self, function: str, timeout_s: float, workers: int) -> None:
        self._function, self._timeout_s, self._count = function, timeout_s, workers
        # The kernel kills a worker when the thread that started it ends (see remote/parent.py), so
        # these threads live as long as the pool.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all workers and load the function. Raises ConfigError if it cannot be loaded."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(
                *(loop.run_in_executor(self._threads, self._start_one) for _ in range(self._count))
            )
        except BaseException:
            await self.close()
            raise

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        if self._closed:
            raise RewardError(f"reward {self._function!r}, prompt {prompt.uid!r}: closed")
        completions = [t.text for t in trajectories]
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._score, prompt, completions
        )

    async def close(self) -> None:
        """End all workers. Running calls fail with RewardError."""
        await asyncio.to_thread(self._close)

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [w.process.pid for w in self._workers]

    def _start_one(self) -> None:
        worker = self._spawn()
        worker.wait_ready()
        self._idle.put(worker)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            busy, self._workers = self._workers, set()
        idle: set[Worker] = set()
        with suppress(queue.Empty):
            while True:
                idle.add(self._idle.get_nowait())
        children = _all_children()  # read only once, because there may be hundreds of workers
        for worker in idle:
            worker.disconnect()
        for worker in idle:
            worker.finish(children)
        for worker in busy - idle:
            worker.kill(children)
        self._threads.shutdown()

    def _spawn(self) -> Worker:
        with self._lock:
            if self._closed:
                raise RewardError(f"reward {self._function!r} is closed")
            try:
                worker = Worker(self._function)
            except OSError as e:
                have = len(self._workers)
                raise RewardError(
                    f"reward {self._function!r}: could not start a process "
                    f"in addition to {have} others: {e}. Lower reward.workers"
                ) from e
            self._workers.add(worker)
        return worker

    def _score(self, prompt: Prompt, completions: list[str]) -> list[Score]:
        try:
            # There are as many workers as threads, so this fails only after close.
            worker = self._idle.get_nowait()
        except queue.Empty:
            raise RewardError(f"reward {self._function!r}, prompt {prompt.uid!r}: closed") from None
        try:
            try:
                return worker.score(completions, prompt.row, prompt.uid, self._timeout_s)
            except _Dead as e:
                log.warning("%s; retrying with a new worker", e)
                worker = self._replace(worker)
                return worker.score(completions, prompt.row, prompt.uid, self._timeout_s)
        except _Lost as e:
            log.warning("%s; starting a replacement", e)
            worker = self._replace(worker)
            raise
        finally:
            self._idle.put(worker)

    def _replace(self, worker: Worker) -> Worker:
        worker.kill()
        with self._lock:
            self._workers.discard(worker)
            if self._closed:
                return worker
        return self._spawn()


def _all_children() -> Children:
    """Return the children of every process (Linux; elsewhere killing the process group must do)."""
    children: Children = {}
    with suppress(OSError):  # /proc cannot be read when there are too many open files
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError, IndexError):
                fields = stat.read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def _descendants(pid: int, children: Children) -> list[int]:
    """Return all descendants of a process, including those that left its process group."""
    found = list(children.get(pid, ()))
    for child in found:
        found.extend(children.get(child, ()))
    return found


def _exit(code: int | None) -> str:
    if code is None:
        return "its connection closed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
