"""Supervisor: the parent process of a run, which restarts it from its last checkpoint if it dies.

Waits for: its child, which is the run. The child is the leader of a process group, so that a signal
from the terminal reaches only the supervisor, which forwards it. A scheduler signals both, so the
supervisor forwards with another signal: the run can tell a copy from a second signal.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LedgerError,
    MismatchError,
    ModelError,
    NonFiniteError,
    PacelineError,
    RewardError,
)
from paceline.remote.parent import end_with_parent

# Before a restart that follows a start without a new checkpoint; doubles with each one.
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
FORWARDED = signal.SIGUSR2
# Environment variables of the child: the parent's process ID, and set if it was restarted.
SUPERVISOR, RESTARTED = "PACELINE_SUPERVISOR", "PACELINE_RESTARTED"
TAIL_BYTES = 1 << 16  # of metrics.jsonl that contain its last line
# A restart repeats these errors.
FINAL = {error.exit_code for error in (LedgerError, MismatchError, NonFiniteError)}
# Before the first step these are mistakes of the user. Later the same settings were accepted, so
# the cause may disappear, for example if a node is missing.
FINAL_AT_START = {
    error.exit_code for error in (ConfigError, DataError, ModelError, RewardError, CheckpointError)
}


class Supervisor:
    def __init__(self, run_dir: Path, restarts: int, tell: Callable[[str], None]) -> None:
        """`restarts`: maximum number of restarts without a new checkpoint in between."""
        self._run_dir, self._restarts, self._tell = run_dir, restarts, tell
        self._child: asyncio.subprocess.Process | None = None
        self._stopped_by: int | None = None
        self._stop = asyncio.Event()

    async def run(self, first: Sequence[str], again: Sequence[str]) -> int:
        """Run `first`, then `again` as long as a restart may help; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            # nohup ignores SIGHUP. SIGINT, which shells ignore in background jobs, gets a handler.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._forward, number)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        saved, used, attempt, step = saved_step(self._run_dir), 0, 1, last_step(self._run_dir)
        code = await self._attempt(first, {})
        # Step 0 is not a new one: --fresh has moved an earlier run aside.
        while self._may_help(code, attempt > 1 or last_step(self._run_dir) not in (0, step)):
            now = saved_step(self._run_dir)
            progressed, saved = now not in (0, saved), now
            used = 0 if progressed else used
            if used >= self._restarts:
                self._tell(
                    f"{_describe(code)}; giving up after {used} restart(s) without a new checkpoint"
                )
                break
            used += 1
            delay = 0.0 if progressed else delay_s(used)
            self._report(code, attempt, used, delay, saved)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay)
            if self._stopped_by is not None:
                return 128 + self._stopped_by
            attempt += 1
            code = await self._attempt(again, {RESTARTED: "1"})
        if self._stopped_by is not None and _signal(code) is not None:
            return 128 + self._stopped_by
        return 128 - code if code < 0 else code

    async def _attempt(self, command: Sequence[str], variables: dict[str, str]) -> int:
        self._child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            env=os.environ | {SUPERVISOR: str(os.getpid())} | variables,
            process_group=0,
        )
        if self._stopped_by is not None:  # while it was being started
            self._forward(self._stopped_by)
        try:
            code = await self._child.wait()
        finally:
            group, self._child = self._child.pid, None
        if code:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)  # what a run that died left behind
        return code

    def _may_help(self, code: int, has_started: bool) -> bool:
        """Return whether a restart may cure what ended the run."""
        stopped = self._stopped_by is not None or _signal(code) in STOPPING
        if code == 0 or stopped or code in FINAL:
            return False
        return has_started or code not in FINAL_AT_START

    def _report(self, code: int, attempt: int, used: int, delay: float, saved: int) -> None:
        where = f"from the checkpoint of step {saved}" if saved else "from the start"
        when = f"in {delay:g} s" if delay else "now"
        self._tell(
            f"{_describe(code)} after step {last_step(self._run_dir)}; restart {used} of "
            f"{self._restarts} {where} {when}"
        )
        event = {"wall_time_s": time.time(), "attempt": attempt, "exit": code, "saved_step": saved}
        with suppress(OSError), (self._run_dir / "restarts.jsonl").open("a") as file:
            file.write(json.dumps(event | {"step": last_step(self._run_dir)}) + "\n")

    def _forward(self, number: int) -> None:
        if number == signal.SIGHUP and self._stopped_by is not None:
            return  # the kernel and the shell both send it when a terminal is closed
        self._stopped_by = number
        self._stop.set()
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(FORWARDED)

    def _suspend(self) -> None:
        """Suspend the run with this process, and resume it with this process."""
        self._signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: int) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)


def delay_s(restarts: int) -> float:
    """Return the seconds before the last of so many restarts without a new checkpoint."""
    doublings = min(restarts - 1, 16)  # a float holds 2 ** 1023, but not the next power of 2
    return min(MAX_DELAY_S, FIRST_DELAY_S * 2**doublings)


def end_with_supervisor() -> bool:
    """Let the kernel end this process with its supervisor; return whether it has one."""
    if parent := os.environ.pop(SUPERVISOR, None):
        end_with_parent(int(parent))
    return parent is not None


def is_restart() -> bool:
    """Return whether a supervisor has restarted this run, whose settings were valid before."""
    return os.environ.pop(RESTARTED, None) is not None


def this_program() -> list[str]:
    """Return how to start `paceline` in the same way as this process was started."""
    script = Path(sys.argv[0])
    if script.name == "paceline" and script.is_file():
        return [sys.executable, str(script)]
    return [sys.executable, "-m", "paceline"]


def saved_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    names = (path.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def last_step(run_dir: Path) -> int:
    """Return the last step in the metrics, 0 if there is none."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return 0


def _signal(code: int) -> int | None:
    """Return the signal that ended a process, also as a shell reports it."""
    number = -code if code < 0 else code - 128
    return number if number > 0 else None


def _describe(code: int) -> str:
    number = _signal(code)
    if number is not None:
        memory = ", which the kernel sends when memory is full" if number == signal.SIGKILL else ""
        return f"the run was killed by signal {number} ({_name(number)}{memory})"
    names: dict[Any, str] = {e.exit_code: e.__name__ for e in PacelineError.__subclasses__()}
    return f"the run ended with exit code {code} ({names.get(code, 'an unexpected error')})"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
