"""Pool of processes for a custom reward function.

A process that hangs or dies is replaced, and the run continues.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from paceline.errors import ConfigError, DataError, RewardError
from paceline.remote.calls import Died, Hung, Interrupted, Lost, Overdue
from paceline.remote.child import end_all
from paceline.reward.calls import scores_of
from paceline.reward.function import RewardFunctionError
from paceline.reward.process import RewardProcess
from paceline.secret_variables import secret_names, withheld_hint
from paceline.types import Prompt, Score, Trajectory

log = logging.getLogger(__name__)


class ProcessReward:
    """The pool as a Reward.

    A plain function scores one group at a time in each process; an async function scores all groups
    that have arrived.
    """

    def __init__(
        self,
        function: str,
        timeout_s: float,
        workers: int,
        optional: bool = False,
        *,
        pass_env: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        check_row: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:
        """Make the pool. `pass_env`: variables that look like secrets, but are passed.

        `environment`: further variables for the processes. `check_row` raises ValueError for a row
        that the function cannot score.
        """
        self._check_row = check_row
        self._function, self._timeout_s, self._optional = function, timeout_s, optional
        self._count = workers
        self._withheld = secret_names(os.environ, pass_env)
        passed = {name: os.environ[name] for name in os.environ if name not in self._withheld}
        self._environment = passed | dict(environment)
        self._processes: dict[int, RewardProcess] = {}  # by their place in the pool
        self._idle: asyncio.Queue[int | None] = asyncio.Queue()  # None: the pool is closed
        self._replacing = asyncio.Lock()
        self._tasks: set[asyncio.Task[list[Score]]] = set()
        self._concurrent = False
        self._closed = False

    async def start(self) -> None:
        """Start all processes and load the function. Raises ConfigError if it cannot be loaded."""
        if self._withheld:
            names = ", ".join(self._withheld)
            log.info("reward %r does not get %s (reward.pass_env)", self._function, names)
        try:
            async with asyncio.TaskGroup() as group:
                loaded = [group.create_task(self._start(place)) for place in range(self._count)]
        except BaseExceptionGroup as failed:
            await self.close()
            raise self._explained(failed.exceptions[0]) from None
        except BaseException:
            await self.close()
            raise
        self._concurrent = loaded[0].result()

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        if self._closed:
            raise self._error(prompt, "closed")
        completions = [trajectory.text for trajectory in trajectories]
        # A process stays occupied when the caller is cancelled, so the task continues.
        task = asyncio.create_task(self._score(prompt, completions))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    def check(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise DataError for a row that cannot be scored. Each row comes with its location."""
        if (check_row := self._check_row) is None:
            return
        for where, row in rows:
            try:
                check_row(row)
            except ValueError as e:
                raise DataError(f"{where} cannot be scored with {self._function!r}: {e}") from e

    async def close(self) -> None:
        """End all processes. Running calls fail with RewardError."""
        self._closed = True
        self._idle.put_nowait(None)
        processes = list(self._processes.values())
        idle = [process for process in processes if not process.calls]
        for process in processes:
            process.calls.fail(Died("closed"))
        for process in idle:
            process.disconnect()
        await asyncio.to_thread(end_all, idle, [p for p in processes if p not in idle])
        self._processes.clear()

    @property
    def pids(self) -> list[int]:
        return [process.process.pid for process in self._processes.values()]

    def processes(self) -> list[RewardProcess]:
        return list(self._processes.values())

    def peak_memory(self) -> int:
        """Return the peak resident bytes of all processes."""
        return sum(process.peak_memory() for process in self._processes.values())

    async def _start(self, place: int) -> bool:
        process = await self._spawn(place)
        try:
            concurrent = await process.ready()
        except Died as e:
            raise RewardError(f"loading reward {self._function!r}: {e}") from e
        self._idle.put_nowait(place)
        return concurrent

    async def _spawn(self, place: int) -> RewardProcess:
        try:
            process = RewardProcess(
                self._function, self._timeout_s, self._optional, self._environment
            )
        except OSError as e:
            raise RewardError(
                f"reward {self._function!r}: could not start a process in addition to "
                f"{len(self._processes)} others: {e}. Lower reward.workers"
            ) from e
        self._processes[place] = process
        await process.connect()
        return process

    async def _score(self, prompt: Prompt, completions: list[str]) -> list[Score]:
        retried = False
        while not self._closed:
            try:
                return await self._attempt(prompt.row, completions)
            except RewardFunctionError as e:
                raise self._error(prompt, str(e)) from e
            except (Overdue, Hung) as e:
                raise self._error(prompt, self._late(e)) from e
            except Died as e:
                if retried and not self._closed:
                    raise self._error(prompt, str(e)) from e
                retried = True
            except Interrupted:
                pass
        raise self._error(prompt, "closed")

    async def _attempt(self, row: Mapping[str, Any], completions: list[str]) -> list[Score]:
        place = await self._take()
        try:
            if self._closed:
                raise Interrupted
            process = self._processes[place]
            try:
                await process.ready()
                return await scores_of(process.submit(completions, row))
            except Lost as e:
                if isinstance(e, Hung) and process.suspended:
                    e = Died(f"{self._late(e)}; it was suspended")
                await self._replace(place, process, e)
                raise e from None
        finally:
            if not self._concurrent:
                self._idle.put_nowait(place)

    async def _take(self) -> int:
        """Return the place of a process that can score a group."""
        if self._concurrent:
            return min(self._processes, key=lambda place: len(self._processes[place].calls))
        place = await self._idle.get()
        if place is None:
            self._idle.put_nowait(None)  # for the next one that waits
            raise Interrupted
        return place

    async def _replace(self, place: int, process: RewardProcess, error: Lost) -> None:
        """Kill a process and start another in its place, unless another group has done so."""
        async with self._replacing:
            if self._closed or self._processes[place] is not process:
                return
            why = str(error) if isinstance(error, Died) else self._late(Hung())
            log.warning("reward %r: %s; starting a replacement", self._function, why)
            await asyncio.to_thread(process.kill)
            if not self._closed:
                await self._spawn(place)

    def _late(self, error: Overdue | Hung) -> str:
        end = "; its process was killed" if isinstance(error, Hung) else ""
        return f"no reply within {self._timeout_s:g} s (reward.timeout_s){end}"

    def _error(self, prompt: Prompt, problem: str) -> RewardError:
        hint = self._hint(problem)
        return RewardError(f"reward {self._function!r}, prompt {prompt.uid!r}: {problem}{hint}")

    def _explained(self, error: BaseException) -> BaseException:
        hint = self._hint(str(error))
        return ConfigError(f"{error}{hint}") if hint and isinstance(error, ConfigError) else error

    def _hint(self, problem: str) -> str:
        return withheld_hint(problem, self._withheld, "reward functions", "reward.pass_env")
