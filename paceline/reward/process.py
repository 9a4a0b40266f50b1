"""A pool of worker processes for a user's reward function. A call that takes too long costs a worker its life, never the run's.

Each call has a deadline. Past it the worker is killed with all its descendants and a new one takes its place.
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

START_S = 120.0  # a reward may import torch or more
PIPE_BYTES = 32 * 1024  # fit into any pipe's buffer
POLL_INTERVAL_S = 0.5  # how often the clock is looked at while an answer is waited for
Families = dict[int, list[int]]
GRACE_S = 1.0  # for a worker to flush its files when the pool closes


class Worker:
    """One process that holds the function and scores one answer after the other."""

    def __init__(self, function: str) -> None:
        self.function = function
        self._ready = False
        self._connection, theirs = Pipe()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline.reward.worker",
                str(theirs.fileno()),
                str(os.getpid()),
                function,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a process group of its own, to be killed as a whole
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        threading.Thread(target=self._relay, daemon=True, name="reward-output").start()

    def wait_ready(self) -> None:
        """Until the function is loaded; raises ConfigError if it cannot be."""
        if self._ready:
            return
        message = self._receive(START_S, f"loading reward {self.function!r}", "to load")
        if "problem" in message:
            raise ConfigError(f"reward.function = {self.function!r}: {message['problem']}")
        self._ready = True

    def score(
        self, answers: Sequence[str], row: Mapping[str, Any], uid: str, timeout_s: float
    ) -> list[Score]:
        """Scored one after the other, each with its own deadline, but sent together, as far as a pipe takes it without a reader."""
        what = f"reward {self.function!r}, prompt {uid!r}"
        self.wait_ready()
        requests = [pickle.dumps((answer, dict(row))) for answer in answers]
        together = sum(map(len, requests)) <= PIPE_BYTES
        replies = []
        for number, request in enumerate(requests):
            with suppress(BrokenPipeError):  # it has died; reading tells
                for outgoing in (requests if number == 0 else ()) if together else (request,):
                    self._connection.send_bytes(outgoing)
            replies.append(self._receive(timeout_s, what, "(reward.timeout_s)"))
        for reply in replies:
            if "problem" in reply:
                raise RewardError(f"{what}: {reply['problem']}")
        return [reply["reward"] for reply in replies]

    def hang_up(self) -> None:
        """Let an idle worker leave by itself, so that the user's files are flushed."""
        self._connection.close()

    def finish(self, families: Families) -> None:
        """See that one that was to leave by itself is gone."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        self.kill(families)

    def kill(self, families: Families | None = None) -> None:
        """End the process and everything it started."""
        descendants = _descendants(self.process.pid, _families() if families is None else families)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _receive(self, timeout_s: float, what: str, limit: str) -> dict[str, Any]:
        try:
            if not self._answers_within(timeout_s):
                raise _Lost(
                    f"{what}: no answer within {timeout_s:g} s {limit}; its process was killed"
                )
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as e:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            raise _Dead(f"{what}: its process ended with {_exit(self.process.returncode)}") from e
        return message

    def _answers_within(self, timeout_s: float) -> bool:
        """Time in which this process is stopped (Ctrl-Z, a suspended job) does not count: the worker may have been stopped, too."""
        while timeout_s > 0:
            waited = min(POLL_INTERVAL_S, timeout_s)
            if self._connection.poll(waited):
                return True
            timeout_s -= waited
        return False

    def _relay(self) -> None:
        """What the function prints goes to the log."""
        assert self.process.stdout is not None
        with self.process.stdout as output, suppress(ValueError, OSError):
            while line := output.readline(4096):
                log.info("reward says: %s", line.decode(errors="replace").rstrip())


class _Lost(RewardError):
    """The worker hangs or is gone."""


class _Dead(_Lost):
    """It is gone. That may be its own doing, or that of someone who needed its memory."""


class ProcessReward:
    """The pool. Threads wait for the workers (one each), so the event loop never does."""

    def __init__(self, function: str, timeout_s: float, workers: int) -> None:
        self._function, self._timeout_s, self._count = function, timeout_s, workers
        # Workers are started from these threads and die with them (see worker.py), so both live as long as the pool.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all workers and load the function; raises ConfigError if it cannot be loaded."""
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
        answers = [t.text for t in trajectories]
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._score, prompt, answers
        )

    async def close(self) -> None:
        """End all workers. A call still running fails with RewardError."""
        await asyncio.to_thread(self._close)

    @property
    def pids(self) -> list[int]:
        """The worker processes there are now."""
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
        families = _families()  # looked at once: there may be hundreds of workers
        for worker in idle:
            worker.hang_up()
        for worker in idle:
            worker.finish(families)
        for worker in busy - idle:
            worker.kill(families)
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
                    f"reward {self._function!r}: a process could not be started beside {have} others: {e}"
                ) from e
            self._workers.add(worker)
        return worker

    def _score(self, prompt: Prompt, answers: list[str]) -> list[Score]:
        try:
            worker = (
                self._idle.get_nowait()
            )  # there are as many workers as threads, so this fails only after close
        except queue.Empty:
            raise RewardError(f"reward {self._function!r}, prompt {prompt.uid!r}: closed") from None
        try:
            try:
                return worker.score(answers, prompt.row, prompt.uid, self._timeout_s)
            except _Dead as e:
                log.warning("%s; another worker tries again", e)
                worker = self._replace(worker)
                return worker.score(answers, prompt.row, prompt.uid, self._timeout_s)
        except _Lost as e:
            log.warning("%s; starting another worker", e)
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


def _families() -> Families:
    """The children of every process (Linux; elsewhere process groups have to do)."""
    children: Families = {}
    with suppress(OSError):  # it cannot be read when there are too many open files
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError, IndexError):
                fields = stat.read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def _descendants(pid: int, families: Families) -> list[int]:
    """All processes below pid, also those that left its process group."""
    found = list(families.get(pid, ()))
    for child in found:
        found.extend(families.get(child, ()))
    return found


def _exit(code: int | None) -> str:
    if code is None:
        return "its connection closed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
