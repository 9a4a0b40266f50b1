"""Environment worker on a node of a cluster: a worker there starts the process and relays calls.

The process is the same as on the controller's machine, so that user code is contained in the same
way. The worker of the cluster watches it: `EnvironmentHost` is its part, `RemoteProcess` the
controller's view of both.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from paceline.environment.process import EnvironmentProcess, HostedCode, packed
from paceline.environment.protocol import EnvironmentFailure
from paceline.errors import WorkerDied
from paceline.remote.calls import Died
from paceline.remote.child import START_TIMEOUT_S
from paceline.remote.worker import Build, Worker, mark_seen
from paceline.secret_variables import secret_names

T = TypeVar("T")
Launch = Callable[[str, Build, tuple[Any, ...]], Awaitable[Worker]]  # name, build, arguments
PART = "environment"
CLOSE_TIMEOUT_S = 5.0  # for the worker to end its process


class EnvironmentHost:
    """Part of a worker: a process of user code on the worker's machine."""

    def __init__(self, place: int, code: HostedCode, variables: Mapping[str, str]) -> None:
        """Start the process and load the code. Raises ConfigError if it cannot be loaded."""
        self._loop = asyncio.new_event_loop()
        # The process ends with this thread (see remote/parent.py).
        threading.Thread(target=self._loop.run_forever, name="environment", daemon=True).start()
        self._changes: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
        self._calls: dict[int, Future[Any]] = {}
        self._process = self._submit(self._start(place, code, variables)).result()

    def name(self) -> tuple[str, str]:
        """Return the name of the environment worker, and that of its machine."""
        return self._process.worker, socket.gethostname()

    def call(self, number: int, episode: int, method: str, argument: bytes) -> "Future[Any]":
        """Call a method of an episode.

        The result has a key "value" or "problem". It says whether the process is lost, so that the
        controller knows it before the next episode begins.
        """
        call = self._submit(self._result(episode, method, argument))
        self._calls[number] = call
        call.add_done_callback(lambda _: self._calls.pop(number, None))
        return call

    def cancel(self, number: int) -> None:
        if call := self._calls.get(number):
            call.cancel()

    def next_change(self) -> "Future[tuple[bool, str]]":
        """Wait until the process is lost, or stuck; return whether it is lost, and why."""
        return self._submit(self._changes.get())

    def close(self) -> "Future[None]":
        return self._submit(self._process.close())

    def end(self) -> "Future[None]":
        return self._submit(self._process.end())

    async def _start(
        self, place: int, code: HostedCode, variables: Mapping[str, str]
    ) -> EnvironmentProcess:
        node = socket.gethostname()
        process = EnvironmentProcess(place, code, variables, self._changed, node)
        await process.connect()
        try:
            await process.ready()
        except BaseException:
            await process.end()
            raise
        return process

    async def _result(self, episode: int, method: str, argument: bytes) -> dict[str, Any]:
        try:
            return {"value": await self._process.call_packed(episode, method, argument)}
        except EnvironmentFailure as failure:
            process = self._process
            return {"problem": str(failure), "lost": process.lost, "cause": process.cause}

    def _changed(self, process: EnvironmentProcess) -> None:
        self._changes.put_nowait((process.lost, process.cause))

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def build_host(
    place: int,
    code: HostedCode,
    pass_env: Sequence[str],
    passed: Mapping[str, str],
    directory: str,
) -> dict[str, Any]:
    """Build the part, in the worker: in the controller's directory, if this machine has it.

    The process gets the variables of this machine that do not look like secrets, and those of the
    controller that `rollout.environment_pass_env` names.
    """
    with suppress(OSError):
        os.chdir(directory)
    withheld = secret_names(os.environ, pass_env)
    variables = {name: value for name, value in os.environ.items() if name not in withheld}
    return {PART: EnvironmentHost(place, code, variables | dict(passed))}


class RemoteProcess:
    """The process of an `EnvironmentHost`, as the controller sees it."""

    def __init__(
        self,
        place: int,
        code: HostedCode,
        pass_env: Sequence[str],
        launch: Launch,
        changed: Callable[["RemoteProcess"], None],
    ) -> None:
        """Make it. `changed` is called when it is lost and when it should be replaced."""
        self.place, self.episodes = place, 0
        self.lost, self.cause = False, ""  # of its end
        self.worker = f"environment worker {place}"
        self._code, self._pass_env = code, tuple(pass_env)
        self._launch, self._changed = launch, changed
        self._remote: Worker | None = None
        self._ready: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._numbers = iter(range(1 << 62))

    async def connect(self) -> None:
        """Start the worker."""
        passed = {
            name: value
            for name, value in os.environ.items()
            if any(fnmatchcase(name, pattern) for pattern in self._pass_env)
        }
        given = (self.place, self._code, self._pass_env, passed, os.getcwd())
        try:
            self._remote = await self._launch(f"environment-{self.place}", build_host, given)
        except (OSError, WorkerDied) as error:
            self.lost, self.cause = True, _first_line(error)  # the next episode tries again
            raise
        self._ready = mark_seen(asyncio.ensure_future(self._start(self._remote)))

    async def ready(self) -> None:
        """Wait until the code is loaded. Raises ConfigError if it cannot be, else Died."""
        assert self._ready is not None, "connect() was not called"
        await asyncio.shield(self._ready)

    async def call(self, episode: int, method: str, argument: Any) -> Any:
        """Call a method of an episode. Raises EnvironmentFailure, which names worker and cause."""
        number, data = next(self._numbers), packed(method, argument)
        assert self._remote is not None
        if self.lost:
            raise EnvironmentFailure(f"{self.worker} was lost with its episodes: {self.cause}")
        try:
            result = await self._remote.call(PART, "call", number, episode, method, data)
        except asyncio.CancelledError:
            with suppress(WorkerDied):
                mark_seen(self._remote.start_call(PART, "cancel", number))
            raise
        except WorkerDied as error:
            self._lose(_first_line(error))
            raise EnvironmentFailure(
                f"{self.worker} died during {method}(): {self.cause}"
            ) from None
        if "problem" not in result:
            return result["value"]
        if result["lost"]:
            self._lose(result["cause"])
        raise EnvironmentFailure(result["problem"])

    async def close(self) -> None:
        """End the process, which first closes the episodes that are still open."""
        await self._finish("close")

    async def end(self) -> None:
        """Kill the process with all its descendants."""
        await self._finish("end")

    async def _start(self, remote: Worker) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await remote.ready()
                self.worker, remote.node = await remote.call(PART, "name")
        except TimeoutError:
            self._lose(f"it did not start within {START_TIMEOUT_S:g} s; is a CPU free?")
            raise Died(self.cause) from None
        except WorkerDied as error:
            self._lose(_first_line(error))
            raise Died(self.cause) from None
        except Exception as error:
            self._lose(str(error))
            raise
        self._watching = asyncio.create_task(self._watch(remote))

    async def _watch(self, remote: Worker) -> None:
        try:
            while not self.lost:
                lost, cause = await remote.call(PART, "next_change")
                if lost:
                    self._lose(cause)
                else:
                    self._changed(self)
        except WorkerDied as error:
            self._lose(_first_line(error))

    def _lose(self, cause: str) -> None:
        if not self.lost:
            self.lost, self.cause = True, cause
            self._changed(self)

    async def _finish(self, method: str) -> None:
        if self._remote is None:
            return
        with suppress(WorkerDied, TimeoutError):
            if not self._remote.starting:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._remote.call(PART, method)
        tasks = [task for task in (self._ready, self._watching) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._remote.close()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
