"""Environment workers: processes that run the episodes of an environment, or the tools of a run.

A process that dies or is blocked is replaced. Its episodes fail with an error that names it; those
of the other processes continue. The processes are children of the controller, or run on the nodes
of a cluster (environment/remote.py).
"""

import asyncio
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.environment.lookup import Located
from paceline.environment.process import EnvironmentProcess, HostedCode
from paceline.environment.protocol import EnvironmentFailure, Message, Reply
from paceline.environment.remote import Launch, RemoteProcess
from paceline.errors import ConfigError, RolloutError, WorkerDied
from paceline.remote.calls import Died, Lost
from paceline.remote.worker import mark_seen
from paceline.secret_variables import secret_names, withheld_hint

log = logging.getLogger(__name__)

Process = EnvironmentProcess | RemoteProcess
MAX_STARTS = 3  # of processes in a row that are lost before they have loaded the code


class EnvironmentPool:
    def __init__(
        self,
        kind: str,
        names: Sequence[str],
        workers: int,
        timeout_s: float,
        pass_env: Sequence[str] = (),
        code: Located | None = None,
    ) -> None:
        """Make the pool. `kind`: "environment" with its name and `code`, or "tools" with functions.

        `pass_env`: variables that look like secrets, but are passed.
        """
        self._kind, self._names, self._count = kind, tuple(names), workers
        given = (code.code, json.dumps(dict(code.arguments))) if code else self._names
        self._code = HostedCode(kind, self.name, given, timeout_s)
        self._pass_env = tuple(pass_env)
        self._launch: Launch | None = None
        self._withheld = secret_names(os.environ, pass_env)
        self._variables = {k: v for k, v in os.environ.items() if k not in self._withheld}
        self._processes: dict[int, Process] = {}  # by their place in the pool
        self._leaving: set[Process] = set()  # replaced, but they still have episodes
        self._replacing: dict[Process, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._closed = False
        self.replaced = 0

    async def start(self, launch: Launch | None = None) -> None:
        """Start all processes and load the code. Raises ConfigError if it cannot be loaded.

        `launch` starts workers on the nodes of a cluster; default: processes of this machine.
        """
        self._launch = launch
        if self._withheld:
            names = ", ".join(self._withheld)
            log.info("%s does not get %s (rollout.environment_pass_env)", self._title, names)
        try:
            for place in range(self._count):
                await self._spawn(place)
            for process in list(self._processes.values()):
                await process.ready()
        except ConfigError as problem:
            raise ConfigError(self._explained(f"{self._title}: {problem}")) from None
        except (Died, WorkerDied, OSError) as problem:
            raise RolloutError(f"{self._title}: cannot start a worker: {problem}") from None

    async def close(self) -> None:
        """End all processes. Each first closes the episodes that are still open."""
        self._closed = True
        processes, replacing = self.processes(), list(self._replacing.values())
        for task in replacing:
            task.cancel()
        await asyncio.gather(*replacing, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in processes))
        self._processes.clear()
        self._leaving.clear()

    def processes(self) -> list[Process]:
        """Return all processes that run, also those that are being replaced."""
        found = (*self._processes.values(), *self._leaving, *self._replacing)
        return list(dict.fromkeys(found))

    @property
    def name(self) -> str:
        return ", ".join(self._names)

    def environment(self) -> "HostedEnvironment":
        """Return a new episode. A process is chosen when it begins."""
        return HostedEnvironment(self, next(self._numbers))

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """Call a tool and return its result."""
        process = await self.enter()
        try:
            return str(await process.call(0, "call", (name, arguments)))
        except EnvironmentFailure as error:
            text = str(error).replace("call()", f"the tool {name}()", 1)
            raise EnvironmentFailure(self._explained(text)) from None
        finally:
            self.leave(process)

    async def enter(self) -> Process:
        """Choose the process with the fewest episodes for a new one."""
        for _ in range(MAX_STARTS):
            while not self._closed:
                process = min(self._processes.values(), key=lambda each: each.episodes)
                if not process.lost:
                    break
                await self._wait_for_replacement(process)
            if self._closed:
                raise EnvironmentFailure("the environment workers are closed")
            process.episodes += 1
            try:
                await process.ready()
                return process
            except (Lost, ConfigError) as error:
                self.leave(process)
                cause = error
            except BaseException:
                self.leave(process)
                raise
        raise EnvironmentFailure(self._explained(f"{process.worker} cannot be started: {cause}"))

    async def _wait_for_replacement(self, process: Process) -> None:
        try:
            await asyncio.shield(self._replace(process))
        except (OSError, WorkerDied) as error:  # no descriptors or no memory
            raise EnvironmentFailure(f"cannot start an environment worker: {error}") from error

    def leave(self, process: Process) -> None:
        process.episodes -= 1
        if process in self._leaving and not process.episodes:
            self._replace(process)

    def failed(self, error: EnvironmentFailure) -> EnvironmentFailure:
        return EnvironmentFailure(self._explained(str(error)))

    async def _spawn(self, place: int) -> None:
        process: Process
        if self._launch:
            process = RemoteProcess(place, self._code, self._pass_env, self._launch, self._changed)
        else:
            process = EnvironmentProcess(place, self._code, self._variables, self._changed)
        self._processes[place] = process
        await process.connect()

    def _changed(self, process: Process) -> None:
        """React to a process that is lost or stuck."""
        if not self._closed and (process.lost or process is self._processes.get(process.place)):
            self._replace(process)

    def _replace(self, process: Process) -> "asyncio.Task[None]":
        """Start another process in place of one, and end it once it is lost or has no episodes."""
        if process not in self._replacing:
            task = asyncio.get_running_loop().create_task(self._replaced(process))
            mark_seen(task)
            self._replacing[process] = task
        return self._replacing[process]

    async def _replaced(self, process: Process) -> None:
        try:
            current = process is self._processes[process.place]
            if current:
                self._leaving.add(process)
                self.replaced += 1
                cause = process.cause or "a call did not end at its deadline"
                log.warning(
                    "%s: %s; it has %d episodes. Starting a replacement",
                    *(process.worker, cause, process.episodes),
                )
            if process.lost:
                await self._end(process)
            if current and not self._closed:
                await self._spawn(process.place)
            if not process.episodes:
                await self._end(process)
        finally:
            del self._replacing[process]

    async def _end(self, process: Process) -> None:
        if process in self._leaving:
            await process.end()
            self._leaving.discard(process)

    @property
    def _title(self) -> str:
        setting = "tools" if self._kind == "tools" else "environment"
        return f"rollout.{setting} = {self.name!r}"

    def _explained(self, problem: str) -> str:
        code, setting = "environment workers", "rollout.environment_pass_env"
        return problem + withheld_hint(problem, self._withheld, code, setting)


class HostedEnvironment:
    """One episode in a process of the pool."""

    def __init__(self, pool: EnvironmentPool, number: int) -> None:
        self._pool, self._number = pool, number
        self._process: Process | None = None

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        self._process = await self._pool.enter()
        messages: list[Message] | None = await self._call("reset", dict(row))
        return messages

    async def step(self, message: Message) -> Reply:
        return Reply(**await self._call("step", dict(message)))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await process.call(self._number, "close", None)
        except EnvironmentFailure:
            if not process.lost:  # else its end has released everything
                raise
        finally:
            self._pool.leave(process)

    async def _call(self, method: str, argument: Any) -> Any:
        assert self._process is not None, "reset() was not called"
        try:
            return await self._process.call(self._number, method, argument)
        except EnvironmentFailure as error:
            raise self._pool.failed(error) from None
