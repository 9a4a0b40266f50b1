"""A process that forks children, which are killed at a chosen point of their work.

Each line on its input is a request, each line of its output the exit status of one child. A fork
takes milliseconds; a new process would import torch first. Nothing here uses torch before the fork.
"""

import asyncio
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self


class Killable:
    """The process as seen by a test."""

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, "-m", "tests.faults.killable", *modules]
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command,
            cwd=root,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def run(self, work: str, *arguments: Any, kill: tuple[str, int, str] | None = None) -> int:
        """Call a function of this module in a child and return its exit code; -9 if killed.

        `kill` is a function or method ("module:Class.method"), the number of its call, and whether
        the child is killed before or after this call.
        """
        assert self._process.stdin and self._process.stdout
        request = {"work": work, "arguments": arguments, "kill": kill}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def train(log: str, *settings: str) -> None:
    from paceline.config import load_config
    from paceline.run import train

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    asyncio.run(train(load_config(None, settings)))


def save(folder: str, step: int) -> None:
    """Save a checkpoint of two files and keep one."""
    from paceline.training.checkpoint import save_checkpoint

    async def write(target: Path) -> None:
        for role in ("actor", "critic"):
            (target / role).mkdir()
            (target / role / "model.safetensors").write_bytes(b"weights" * 500)

    asyncio.run(save_checkpoint(Path(folder), step, {"step": step}, write, keep=1))


def kill_at(target: str, number: int, when: str) -> None:
    """Let this process kill itself at this call of a function."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function, calls = getattr(owner, name), 0

    def due(moment: str) -> None:
        nonlocal calls
        calls += moment == "before"
        if moment == when and calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed(*args: Any, **named: Any) -> Any:
        due("before")
        result = function(*args, **named)
        due("after")
        return result

    async def killed_async(*args: Any, **named: Any) -> Any:
        due("before")
        result = await function(*args, **named)
        due("after")
        return result

    setattr(owner, name, killed_async if inspect.iscoroutinefunction(function) else killed)


def _child(request: dict[str, Any]) -> None:
    try:
        if request["kill"]:
            kill_at(*request["kill"])
        work: Callable[..., None] = globals()[request["work"]]
        work(*request["arguments"])
        os._exit(0)
    finally:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


def main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _child(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
