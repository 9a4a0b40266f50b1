"""Environments and tools for workers, of which some misbehave: `hosted_environments.py:Name`."""

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.environment.protocol import Message, Reply


class Echo:
    """Repeats the message of the model. The row says how the episode behaves."""

    async def reset(self, row: Mapping[str, Any]) -> None:
        self._row = row

    async def step(self, message: Message) -> Reply:
        text = str(message["content"])
        if "log" in self._row:
            _write(self._row["log"], f"step {os.getpid()}")
        return Reply(f"you said {text}", reward=0.5, done=text == "stop")

    async def close(self) -> None:
        if "log" in self._row:
            _write(self._row["log"], "close")


class Misbehaving(Echo):
    """Does what the model says, if that is one of its methods."""

    async def step(self, message: Message) -> Reply:
        what = getattr(self, str(message["content"]), None)
        found = await what() if what else None
        return found or await super().step(message)

    async def wait(self) -> None:
        await asyncio.sleep(600)

    async def block(self) -> None:
        time.sleep(600)

    async def hold_the_gil(self) -> None:
        ctypes.PyDLL(None).sleep(600)

    async def exit(self) -> None:
        os._exit(3)

    async def segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    async def leave(self) -> None:
        sys.exit("bye")

    async def leave_in_task(self) -> None:
        await asyncio.gather(self.leave())

    async def interrupt(self) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(600)

    async def fail(self) -> None:
        raise KeyError("no such move")

    async def flood(self) -> Reply:
        return Reply("x" * 9_000_000)

    async def flood_output(self) -> None:
        for _ in range(1000):
            os.write(1, b"x" * 65_536)

    async def forge(self) -> None:
        for descriptor in range(3, 4096):  # one of them is the connection to the controller
            try:
                os.write(descriptor, b"y" * 20_000_000)
            except OSError:
                continue

    async def fork(self) -> None:
        if os.fork() == 0:
            return  # the child continues as if it were the worker

    async def start_daemons(self) -> None:
        for session in (False, True):
            child = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session
            )
            _write(self._row["pids"], str(child.pid))

    async def odd(self) -> Reply:
        return Reply([{"role": "user", "content": object()}])

    async def secret(self) -> Reply:
        return Reply(os.environ["MY_API_KEY"])


class Folder(Echo):
    """Holds a temporary directory, which close() removes."""

    async def reset(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self._folder = tempfile.mkdtemp(dir=row["folders"])

    async def close(self) -> None:
        shutil.rmtree(self._folder)


class ClosesLate(Echo):
    async def close(self) -> None:
        await asyncio.sleep(600)


class SometimesCrashes(Echo):
    """Ends its process in the first episode of all."""

    async def step(self, message: Message) -> Reply:
        if not os.path.exists(os.environ["CRASHED"]):
            Path(os.environ["CRASHED"]).touch()
            os._exit(5)
        return Reply(done=True)


class Slow(Echo):
    async def step(self, message: Message) -> Reply:
        await asyncio.sleep(self._row.get("seconds", 1.0))
        return await super().step(message)


def _write(path: str, line: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{line}\n")


def shout(text: str) -> str:
    """Return a text in capitals.

    Args:
        text: The text.
    """
    return f"{text.upper()} {os.getpid()}"


def hang(text: str) -> str:
    """Never return.

    Args:
        text: Anything.
    """
    while True:
        time.sleep(0.01)


def crash(text: str) -> str:
    """End the process.

    Args:
        text: Anything.
    """
    os._exit(4)
