"""The process that runs a user's reward function: `python -m paceline.reward.worker FD PARENT_PID FUNCTION`.

Answers and rows come in over a private socket, numbers or reasons go out as JSON; stdout stays free for the function's own
prints. It ends with its parent, whatever the function is doing. Only the standard library is imported, so it starts fast.
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
    """Something to tell the parent."""


# A parameter that gives away what a reward was written for, and how it is called from ours.
OTHER_LIBRARIES = {
    "completions": ("TRL", "return {name}(completions=[answer], **row)[0]"),
    "solution_str": (
        "verl",
        'return {name}(row["data_source"], answer, row["reward_model"]["ground_truth"], row.get("extra_info"))',
    ),
}


def find_function(spec: str) -> Callable[..., Any]:
    """The reward that a spec names: a function, or a class of which one is made, to be called as a function."""
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
            how = f"def reward(answer, row): {how.format(name=name)}"
            raise RewardFunctionError(
                f"{name}{signature} is written for {wanted_by}; here a reward is called as reward(answer, row). Wrap it: {how}"
            )
        signature.bind(*([None] if inspect.isclass(function) else []), "", {})
    except TypeError as e:
        raise RewardFunctionError(
            f"{name}{signature} cannot be called as reward(answer, row), where row is the data set row as a dict: {e}"
        ) from e
    except ValueError:
        pass  # some built-in functions do not tell their signature
    if inspect.isgeneratorfunction(function):
        raise RewardFunctionError(
            f"{name!r} is a generator; expected a function that returns a number"
        )
    made: Callable[..., Any] = function() if isinstance(function, type) else function
    return made


def as_reward(value: Any) -> float | dict[str, float]:
    """The value as a finite float, or several by name, the reward among them; raises Problem otherwise."""
    if isinstance(value, Mapping):
        named = {"reward" if name == "score" else str(name): part for name, part in value.items()}
        if "reward" not in named:
            raise RewardFunctionError(
                f"returned {_short(value)}; a dict needs a 'reward' (the rest is for the record)"
            )
        return {
            name: _number(part)
            for name, part in named.items()
            if name == "reward" or _is_number(part)
        }
    return _number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of numpy or torch
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
    function: Callable[..., Any], answer: str, row: Mapping[str, Any]
) -> float | dict[str, float]:
    """The function's reward; raises Problem with its exception and the line that raised it."""
    try:
        value = function(answer, row)
        if inspect.iscoroutine(value):
            import asyncio  # for those who want it

            value = asyncio.run(value)
    except (Exception, SystemExit) as e:
        raise RewardFunctionError(
            f"raised {type(e).__name__}: {_short(str(e), quote=False)}{_line(e, function)}"
        ) from e
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
        frame = [
            f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith("<")
        ][-1]
        place, what = (
            (f"{frame.filename}:{frame.lineno}", e)
            if not isinstance(e, SyntaxError)
            else (f"{e.filename}:{e.lineno}", e.msg)
        )
        return reply(
            problem=f"importing it raised {type(e).__name__}: {_short(str(what), quote=False)} ({place})"
        )
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
