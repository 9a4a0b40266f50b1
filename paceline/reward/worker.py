"""Process that runs a custom reward function.

Usage: `python -m paceline.reward.worker FD PARENT_PID FUNCTION`. Completions and rows arrive over a
private socket; rewards or errors leave as JSON, so stdout is free for the function's prints. The
process ends with its parent, even while the function runs. It starts fast, because it imports only
the standard library.
"""

import ctypes
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
from typing import Any

from paceline.plugins import PluginError, find_callable
from paceline.remote.parent import end_with_parent

LARGEST = 3.4e38  # rewards are kept as float32
PR_SET_CHILD_SUBREAPER = 36


class RewardFunctionError(Exception):
    """A reward function that cannot be used, raised an exception or returned no valid reward."""


# Parameter name that identifies the library a reward was written for, and the call that adapts it.
OTHER_LIBRARIES = {
    "completions": ("TRL", "return {name}(completions=[completion], **row)[0]"),
    "solution_str": (
        "verl",
        'return {name}(row["data_source"], completion, row["reward_model"]["ground_truth"], '
        'row.get("extra_info"))',
    ),
}


def find_function(spec: str) -> Callable[..., Any]:
    """Return the reward function of a spec; a class is instantiated and its instance is called.

    Raises PluginError if there is none and RewardFunctionError if it has the wrong signature.
    """
    function, name = find_callable(spec), spec.rpartition(":")[2]
    try:
        signature = inspect.signature(function.__call__ if inspect.isclass(function) else function)
        wanted_by, how = next(
            (
                OTHER_LIBRARIES[parameter]
                for parameter in signature.parameters
                if parameter in OTHER_LIBRARIES
            ),
            ("", ""),
        )
        if wanted_by:
            how = f"def reward(completion, row): {how.format(name=name)}"
            raise RewardFunctionError(
                f"{name}{signature} is written for {wanted_by}; "
                f"Paceline calls reward(completion, row). Wrap it: {how}"
            )
        signature.bind(*([None] if inspect.isclass(function) else []), "", {})
    except TypeError as e:
        raise RewardFunctionError(
            f"{name}{signature} cannot be called as reward(completion, row), "
            f"where row is the dataset row as a dict: {e}"
        ) from e
    except ValueError:
        pass  # some built-in functions have no signature
    if inspect.isgeneratorfunction(function):
        raise RewardFunctionError(
            f"{name!r} is a generator; expected a function that returns a number"
        )
    return function() if isinstance(function, type) else function


def as_reward(value: Any) -> float | dict[str, float]:
    """Return the value as a finite float, or as a dict of them that has a "reward".

    Raises RewardFunctionError.
    """
    if isinstance(value, Mapping):
        named = {"reward" if name == "score" else str(name): item for name, item in value.items()}
        if "reward" not in named:
            raise RewardFunctionError(
                f"returned {_short(value)}; a dict needs a 'reward' (other numbers are recorded)"
            )
        return {
            name: _number(item)
            for name, item in named.items()
            if name == "reward" or _is_number(item)
        }
    return _number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, numbers.Real):
        raise RewardFunctionError(
            f"returned {_short(value)} ({type(value).__name__}); expected a number"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise RewardFunctionError(
            f"returned {_short(value)} ({type(value).__name__}); expected a finite number"
        )
    return number


def call(
    function: Callable[..., Any], completion: str, row: Mapping[str, Any]
) -> float | dict[str, float]:
    """Call the function and return its reward.

    Raises RewardFunctionError with the function's exception and the line that raised it.
    """
    try:
        value = function(completion, row)
        if inspect.iscoroutine(value):
            import asyncio  # imported only for async functions, because it is slow

            value = asyncio.run(value)
    except (Exception, SystemExit) as e:
        raise RewardFunctionError(
            f"raised {type(e).__name__}: {_short(str(e), quote=False)}{_line(e, function)}"
        ) from e
    return as_reward(value)


def _line(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the location of the error: the last line in the user's file, else the last line."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is `call`
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [f for f in frames if code is not None and f.filename == code.co_filename]
    frame = (own or frames)[-1:]
    return "".join(f" ({f.filename}:{f.lineno})" for f in frame)


def _short(value: Any, quote: bool = True) -> str:
    text = repr(value) if quote else str(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _watch(connection: Connection, requests: "queue.SimpleQueue[Any]") -> None:
    """Receive requests. Exit soon after the parent disconnects, even if the function hangs."""
    try:
        while True:
            requests.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        requests.put(None)
        time.sleep(2.0)
        os.killpg(os.getpgrp(), signal.SIGKILL)


def main(fd: int, parent: int, spec: str) -> None:
    end_with_parent(parent)
    if sys.platform == "linux":  # adopt orphaned grandchildren, so that the parent finds them
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    connection = Connection(fd)

    def reply(**message: Any) -> None:
        connection.send_bytes(json.dumps(message).encode())

    try:
        function = find_function(spec)
    except (PluginError, RewardFunctionError) as e:
        return reply(problem=str(e))
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        frame = [f for f in frames if not f.filename.startswith("<")][-1]
        where, what = f"{frame.filename}:{frame.lineno}", str(e)
        if isinstance(e, SyntaxError):
            where, what = f"{e.filename}:{e.lineno}", e.msg
        what = _short(what, quote=False)
        return reply(problem=f"importing it raised {type(e).__name__}: {what} ({where})")
    reply(ready=True)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(connection, requests), daemon=True).start()
    while request := requests.get():
        try:
            reply(reward=call(function, *request))
        except RewardFunctionError as e:
            reply(problem=str(e))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
