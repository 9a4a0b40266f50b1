"""The choice of a sandbox, and the public function."""

import functools
import logging
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from paceline.errors import ConfigError, RewardError
from paceline.sandbox.bubblewrap import Bubblewrap, Unavailable, find
from paceline.sandbox.supervisor import Limits, NotStarted, Result
from paceline.sandbox.weak import LACKS, run_weakly

log = logging.getLogger(__name__)

ALLOW_WEAK = "PACELINE_ALLOW_WEAK_SANDBOX"  # how a run tells its reward processes


def run(
    code: str,
    *,
    stdin: str = "",
    timeout_s: float = 5.0,
    cpu_s: float | None = None,
    memory_mb: int = 512,
    processes: int = 16,
    output_kb: int = 64,
    disk_mb: int = 64,
    readable: Sequence[str | os.PathLike[str]] = (),
    allow_weak: bool | None = None,
) -> Result:
    """Run a Python program that a model wrote, and return what it printed and how it ended.

    The program sees the packages of this Python environment, an empty /tmp and nothing else of the
    machine, unless `readable` names further files or directories. It has no network, no variables
    of this environment and no open files. All its processes end with it.

    `timeout_s` is wall-clock time from the start of the program, `cpu_s` CPU time of each process
    (default: `timeout_s`), `disk_mb` the size of its temporary files. `processes` includes threads.

    Raises ConfigError where bubblewrap does not work, unless `allow_weak` is set (default: the
    setting reward.allow_weak_sandbox inside a reward process, else False). Then the program runs
    with the limits only. Raises RewardError if the sandbox cannot be started this time.
    """
    limits = _limits(
        timeout_s, timeout_s if cpu_s is None else cpu_s, memory_mb, processes, output_kb, disk_mb
    )
    return _run(code, stdin, limits, readable, allow_weak)


def run_pair(first: str, second: str, *, timeout_s: float, output_kb: int) -> Result:
    """Run two programs in two sandboxes until the second ends, and return what that one did.

    They reach each other only through a socket, which is descriptor 0 of each.
    """
    limits = _limits(timeout_s, timeout_s, 512, 16, output_kb, 64)
    ended = threading.Event()
    with ExitStack() as stack:
        left, right = (stack.enter_context(end) for end in socket.socketpair())
        threads = stack.enter_context(ThreadPoolExecutor(1))
        other = threads.submit(_run, first, left, limits, ended=ended)
        try:
            result = _run(second, right, limits)
        finally:
            ended.set()
        other.result()
        return result


def _limits(*numbers: float) -> Limits:
    limits = Limits(*numbers)  # type: ignore[arg-type]
    for name in Limits.__slots__:
        if not (value := getattr(limits, name)) > 0:
            raise ConfigError(f"sandbox.run: {name} = {value!r}; expected more than 0")
    return limits


def _run(
    code: str,
    stdin: str | socket.socket,
    limits: Limits,
    readable: Sequence[str | os.PathLike[str]] = (),
    allow_weak: bool | None = None,
    ended: threading.Event | None = None,
) -> Result:
    """Run a program until it ends, hits a limit or `ended` is set."""
    sandbox = check(allow_weak)
    try:
        if sandbox is None:
            return run_weakly(code, stdin, limits, ended)
        paths = [Path(path).absolute() for path in readable]
        return sandbox.run(code, stdin, limits, paths, ended)
    except (NotStarted, OSError) as e:
        raise RewardError(f"the sandbox could not be started: {e}") from e


def check(allow_weak: bool | None = None) -> Bubblewrap | None:
    """Return the sandbox that works here, or None for the weak mode. Raises ConfigError."""
    found = _find()
    if isinstance(found, Bubblewrap):
        return found
    if allow_weak is None:
        allow_weak = os.environ.get(ALLOW_WEAK) == "1"
    if not allow_weak:
        raise ConfigError(
            f"code that a model wrote needs a sandbox, but {found}. To run the code with limits "
            "only, set reward.allow_weak_sandbox=true, or allow_weak=True in a call; "
            f"then {LACKS}"
        )
    _warn()
    return None


@functools.cache
def _find() -> Bubblewrap | str:
    try:
        return find()
    except Unavailable as e:
        return str(e)


@functools.cache
def _warn() -> None:
    log.warning("code that the model wrote runs without a sandbox (%s): %s", _find(), LACKS)
