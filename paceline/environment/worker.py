"""Process that runs many episodes of a custom environment, or the tools of a run.

Usage: `python -m paceline.environment.worker FD PARENT_PID STACKS_FD TIMEOUT_S KIND NAME…`, where
KIND is "environment" with a class and its arguments as JSON, or "tools" with functions. Requests
arrive pickled over a private socket; replies leave as lines of JSON, so stdout is free for prints.
All episodes share one event loop. The process ends with its parent, and closes the episodes that
are open then.
"""

import asyncio
import json
import os
import pickle
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from paceline.environment.lookup import Located
from paceline.environment.protocol import EnvironmentFailure, Reply, first_messages, missing_method
from paceline.environment.tools import Toolbox
from paceline.environment.user_code import line_of
from paceline.errors import ConfigError
from paceline.plugins import PluginError
from paceline.printable import describe_error, unicode_output
from paceline.remote.link import Link, open_link
from paceline.suspend import ignore_suspended_time

CLOSE_TIMEOUT_S = 10.0
MAX_REPLY = 8 << 20  # bytes; fewer than the parent accepts
EXIT_TIMEOUT_S = 0.8  # for open episodes to close when the parent disconnects


class Hosted(Protocol):
    """What a process hosts. Its methods are called with the number of an episode."""

    leaks: frozenset[str]  # methods that may leave a thread or a resource behind at their deadline

    async def close_all(self) -> None: ...


class Episodes:
    leaks = frozenset({"close"})

    def __init__(self, code: str, arguments: Mapping[str, Any]) -> None:
        """Load the class. Raises PluginError if it is not an environment."""
        found = Located(code, arguments).load()
        self._make = partial(found, **arguments)
        if method := missing_method(found):
            raise PluginError(
                f"has no method `async def {method}`; in a worker (rollout.environment_workers) "
                "expected reset(self, row), step(self, message) and optionally close(self)"
            )
        if getattr(found, "tools", ()):
            raise PluginError(
                "has tools, which cannot run in a worker; remove rollout.environment_workers, or "
                "call them in step(self, message)"
            )
        self._open: dict[int, Any] = {}

    async def reset(self, episode: int, row: Mapping[str, Any]) -> Any:
        self._open[episode] = environment = self._make()
        return first_messages(await environment.reset(row))

    async def step(self, episode: int, message: Mapping[str, Any]) -> Any:
        reply = await self._open[episode].step(message)
        if not isinstance(reply, Reply):
            raise EnvironmentFailure(f"step() returned {reply!r:.80}; expected a Reply")
        return {"messages": reply.messages, "reward": reply.reward, "done": reply.done}

    async def close(self, episode: int, _: None = None) -> None:
        close = getattr(self._open.pop(episode, None), "close", None)
        if close is not None:  # an environment without resources has none
            await close()

    async def close_all(self) -> None:
        await asyncio.gather(*map(self.close, list(self._open)), return_exceptions=True)


class Tools:
    leaks = frozenset({"call"})  # a function that is not async runs on a thread

    def __init__(self, names: Sequence[str]) -> None:
        self._toolbox = Toolbox(names, describe=False)

    async def call(self, _: int, call: tuple[str, Mapping[str, Any]]) -> str:
        return await self._toolbox.call(*call)

    async def close_all(self) -> None:
        return


class Server:
    """Answers requests until the parent disconnects."""

    def __init__(self, hosted: Hosted, link: Link, timeout_s: float) -> None:
        self._hosted, self._link, self._timeout_s = hosted, link, timeout_s
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._process = os.getpid()
        self._main: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._main = asyncio.current_task()
        ignore_suspended_time(loop)

        def receive(request: Any) -> None:
            if request is None:
                ended.set()
            else:
                self._begin(*request)

        self._link.reply(ready=True)
        self._link.watch(lambda request: loop.call_soon_threadsafe(receive, request))
        await ended.wait()
        for task in self._tasks.values():
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._hosted.close_all()

    def _begin(self, number: int, episode: int, method: str, argument: Any) -> None:
        if method == "cancel":
            if task := self._tasks.get(argument):
                task.cancel()
            return
        task = asyncio.create_task(self._answer(number, episode, method, argument))
        self._tasks[number] = task

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.pop(number, None)
            # Cancelled before it began: the parent must not wait for its deadline.
            if task.cancelled() and not self._dying():
                with suppress(OSError):
                    self._link.reply(number=number, problem=f"{method}() was cancelled")

        task.add_done_callback(done)

    async def _answer(self, number: int, episode: int, method: str, argument: Any) -> None:
        self._link.reply(started=number)
        limit = min(CLOSE_TIMEOUT_S, self._timeout_s) if method == "close" else self._timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                value = await self._call(method, episode, pickle.loads(argument))
            return self._link.send(_encoded(number, method, value))
        except EnvironmentFailure as error:
            problem = str(error)
        except asyncio.CancelledError:
            if self._dying():
                raise
            problem = f"{method}() was cancelled"
        except BaseException as error:  # also SystemExit, which would end the process
            if isinstance(error, TimeoutError) and deadline.expired():
                stuck = method in self._hosted.leaks
                return self._link.reply(number=number, overdue=True, stuck=stuck)
            problem = f"{method}() raised {describe_error(error)} ({line_of(error)})"
        with suppress(OSError):  # the parent has disconnected
            self._link.reply(number=number, problem=problem[:4000])

    def _dying(self) -> bool:
        """Return whether sys.exit in a task of the environment, or a signal, ends this process.

        The parent then gets no replies, but the exit code.
        """
        main = self._main
        return main is not None and (main.done() or main.cancelling() > 0)

    def _call(self, method: str, episode: int, argument: Any) -> Awaitable[Any]:
        return self._in_parent(getattr(self._hosted, method)(episode, argument))

    async def _in_parent(self, call: Awaitable[Any]) -> Any:
        """End a process that the code has forked, which would serve the same requests."""
        try:
            return await call
        finally:
            if os.getpid() != self._process:
                os._exit(0)


def _encoded(number: int, method: str, value: Any) -> bytes:
    try:
        line = json.dumps({"number": number, "value": value}, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailure(
            f"{method}() returned what cannot be serialized as JSON: {error}; use numbers, "
            "strings, lists and dicts"
        ) from None
    if len(line) > MAX_REPLY:
        raise EnvironmentFailure(
            f"{method}() returned {len(line)} bytes; expected at most {MAX_REPLY}"
        )
    return line


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "item"):  # a number of numpy
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a number, string, list or dict")


def main(fd: int, parent: int, stacks: int, timeout_s: float, kind: str, names: list[str]) -> None:
    link = open_link(fd, parent, stacks)
    try:
        hosted: Hosted = (
            Tools(names) if kind == "tools" else Episodes(names[0], json.loads(names[1]))
        )
    except ConfigError as problem:
        return link.reply(problem=str(problem))
    except (Exception, SystemExit) as error:
        what = f"{describe_error(error)} ({line_of(error)})"
        return link.reply(problem=f"importing it raised {what}")
    asyncio.run(Server(hosted, link, timeout_s).run())


if __name__ == "__main__":
    unicode_output()
    fd, parent, stacks = map(int, sys.argv[1:4])
    main(fd, parent, stacks, float(sys.argv[4]), sys.argv[5], sys.argv[6:])
