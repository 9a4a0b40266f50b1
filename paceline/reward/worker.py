"""The process that runs a user's reward function: `python -m paceline.reward.worker FD FUNCTION`.

Answers and rows come in over a private socket, numbers or reasons go out as JSON; stdout stays free for the function's own
prints. It ends with its parent, whatever the function is doing. Only the standard library is imported, so it starts fast.
"""

import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LARGEST = 3.4e38  # rewards are kept as float32
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Problem(Exception):
    """Something to tell the parent."""


def find_function(spec: str) -> Callable[..., Any]:
    """The function that "module:function" or "file.py:function" names."""
    place, _, name = spec.rpartition(":")
    module = _load_file(Path(place).expanduser()) if place.endswith(".py") else _load_module(place)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            have = [n for n, f in vars(module).items() if callable(f) and not n.startswith("_")]
            raise Problem(f"no {name!r} in {module.__file__}; it has {', '.join(have) or 'no functions'}")
        function = getattr(function, part)
    if not callable(function):
        raise Problem(f"{name!r} in {module.__file__} is {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise Problem(f"{name!r} in {module.__file__} is async or a generator; expected a plain function that returns a number")
    try:
        inspect.signature(function).bind("", {})
    except TypeError as e:
        raise Problem(f"{name}{inspect.signature(function)} in {module.__file__} cannot be called as reward(answer, row): {e}") from e
    except ValueError:
        pass  # some built-in functions do not tell their signature
    return function


def as_reward(value: Any) -> float:
    """The value as a finite float; raises Problem otherwise."""
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of numpy or torch
    if not isinstance(value, numbers.Real):
        raise Problem(f"returned {_short(value)} ({type(value).__name__}); expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise Problem(f"returned {_short(value)} ({type(value).__name__}); expected a finite number")
    return number


def call(function: Callable[..., Any], answer: str, row: Mapping[str, Any]) -> float:
    """The function's reward; raises Problem with its exception and the line that raised it."""
    try:
        value = function(answer, row)
    except (Exception, SystemExit) as e:
        raise Problem(f"raised {type(e).__name__}: {_short(str(e), quote=False)}{_line(e, function)}") from e
    return as_reward(value)


def _line(error: BaseException, function: Callable[..., Any]) -> str:
    """Where in the user's file (else at all) it happened."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is `call`
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [f for f in frames if code is not None and f.filename == code.co_filename]
    frame = (own or frames)[-1:]
    return "".join(f" ({f.filename}:{f.lineno})" for f in frame)


def _short(value: Any, quote: bool = True) -> str:
    text = repr(value) if quote else str(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not (name == e.name or name.startswith(e.name + ".")):
            raise  # the module is there; something it imports is not
        raise Problem(f"no module {name!r}; looked in {', '.join(p or os.getcwd() for p in sys.path)}") from e


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise Problem(f"no file {str(file)!r} (looked from {os.getcwd()})")
    sys.path.insert(0, str(file.resolve().parent))  # so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _end_with_parent(parent: int) -> None:
    """Linux: be killed when the parent ends, also inside C code; and adopt orphaned grandchildren, so that the parent finds them."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def _watch(connection: Connection, requests: "queue.SimpleQueue[Any]") -> None:
    """Take requests from the socket; when the parent closes it, end after a moment, whatever the function is doing."""
    try:
        while True:
            requests.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        requests.put(None)
        time.sleep(2.0)
        os.killpg(os.getpgrp(), signal.SIGKILL)


def main(fd: int, parent: int, spec: str) -> None:
    _end_with_parent(parent)
    connection = Connection(fd)

    def reply(**message: Any) -> None:
        connection.send_bytes(json.dumps(message).encode())

    try:
        function = find_function(spec)
    except Problem as e:
        return reply(problem=str(e))
    except (Exception, SystemExit) as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        return reply(problem=f"importing it raised {type(e).__name__}: {_short(str(e), quote=False)} ({frame.filename}:{frame.lineno})")
    reply(ready=True)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(connection, requests), daemon=True).start()
    while request := requests.get():
        try:
            reply(reward=call(function, *request))
        except Problem as e:
            reply(problem=str(e))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
