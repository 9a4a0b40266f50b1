"""Process that runs a custom reward function.

Usage: `python -m paceline.reward.worker FD PARENT_PID STACKS_FD TIMEOUT_S FUNCTION`. Completions
and rows arrive pickled over a private socket; rewards or errors leave as lines of JSON, so stdout
is free for the function's prints. A plain function scores one completion after another; an async
function scores all that have arrived, in one event loop that lives as long as the process. The
process ends with its parent, even while the function runs. It starts fast, because it imports only
the standard library. On SIGUSR1 it writes its stacks to the file STACKS_FD.
"""

import pickle
import queue
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.plugins import PluginError, find_callable
from paceline.printable import unicode_output
from paceline.remote.link import Link, open_link
from paceline.reward.function import (
    RewardFunctionError,
    call,
    call_async,
    check_function,
    explain_import,
    function_name,
    instance,
    is_async,
)

Function = Callable[..., Any]


def main(fd: int, parent: int, stacks: int, timeout_s: float, spec: str) -> None:
    link = open_link(fd, parent, stacks)
    try:
        function = find_callable(spec)
        check_function(function, function_name(spec))
        if not is_async(function):
            function = instance(function)
    except (PluginError, RewardFunctionError) as e:
        return link.reply(problem=str(e))
    except (Exception, SystemExit) as e:
        return link.reply(problem=explain_import(e))
    if not is_async(function):
        return serve(function, link)
    import asyncio  # imported only for async functions, because it is slow

    asyncio.run(serve_concurrently(function, link, timeout_s))


def serve(function: Function, link: Link) -> None:
    """Score one completion after another until the parent disconnects."""
    link.reply(ready=True, concurrent=False)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link.watch(requests.put)
    run = _Runner()
    while request := requests.get():
        completions, row = request
        for number, completion in completions:
            try:
                link.reply(number=number, reward=call(function, completion, _unpack(row), run))
            except RewardFunctionError as e:
                link.reply(number=number, problem=str(e))


async def serve_concurrently(function: Function, link: Link, timeout_s: float) -> None:
    """Score every completion as soon as it arrives, until the parent disconnects."""
    import asyncio

    from paceline.suspend import ignore_suspended_time

    loop = asyncio.get_running_loop()
    ignore_suspended_time(loop)
    try:
        scorer = instance(function)  # in the loop, because it may create a client
    except (Exception, SystemExit) as e:
        return link.reply(problem=explain_import(e))
    tasks: set[asyncio.Task[None]] = set()
    ended = asyncio.Event()

    async def score(number: int, completion: str, row: bytes) -> None:
        link.reply(started=number)
        try:
            reward = await call_async(scorer, completion, _unpack(row), timeout_s)
            link.reply(number=number, reward=reward)
        except RewardFunctionError as e:
            link.reply(number=number, problem=str(e))
        except TimeoutError:
            link.reply(number=number, overdue=True)
        except asyncio.CancelledError:
            with suppress(OSError):  # the parent may have disconnected
                link.reply(number=number, problem="raised CancelledError")

    def begin(request: Any) -> None:
        if request is None:
            return ended.set()
        completions, row = request
        for number, completion in completions:
            task = loop.create_task(score(number, completion, row))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    link.reply(ready=True, concurrent=True)
    link.watch(lambda request: loop.call_soon_threadsafe(begin, request))
    await ended.wait()


def _unpack(row: bytes) -> dict[str, Any]:
    """Return a copy of the row for one call, which the function may change."""
    try:
        found: dict[str, Any] = pickle.loads(row)
        return found
    except Exception as e:
        raise RewardFunctionError(
            f"cannot be called, because its process cannot unpickle the row: {e}"
        ) from e


class _Runner:
    """Event loop for a plain function that returns a coroutine, made on first use."""

    _loop: Any = None

    def __call__(self, coroutine: Any) -> Any:
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)


if __name__ == "__main__":
    unicode_output()
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
