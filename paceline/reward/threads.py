"""Reward function of the program that started the run, in the same process.

A plain function runs in daemon threads, an async one in an event loop in a daemon thread, so that
neither can block the run. A thread that exceeds a deadline is abandoned and replaced. Python cannot
end a thread in C code (time.sleep), but such a thread does not keep the interpreter from exiting.
"""

import asyncio
import ctypes
import inspect
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.errors import ConfigError, RewardError
from paceline.remote.calls import GRACE_S, POLL_INTERVAL_S, Calls, Hung, Interrupted, Overdue
from paceline.reward.calls import scores_of
from paceline.reward.function import (
    RewardFunctionError,
    as_optional_reward,
    as_score,
    call_async,
    check_function,
    explained,
    function_name,
    instance,
    is_async,
    make_instance,
)
from paceline.suspend import ignore_suspended_time
from paceline.types import Prompt, Score, Trajectory, copied_row

MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)

Function = Callable[..., Any]


class CallableReward:
    """The function as a Reward."""

    def __init__(self, function: Function, timeout_s: float, optional: bool = False) -> None:
        """Check the function. `optional`: it may return None. Raises ConfigError."""
        self.name = function_name(function)
        self._timeout_s, self._optional = timeout_s, optional
        self._closed = False
        self._async = is_async(function)
        try:
            check_function(function, self.name)
            self._function = function if self._async else make_instance(function, self.name)
        except RewardFunctionError as e:
            raise ConfigError(f"reward function {self.name!r}: {e}") from e
        self._loop = _LoopThreads(timeout_s)
        self._threads = _FunctionThreads(timeout_s)

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        where = f"reward {self.name!r}, prompt {prompt.uid!r}"
        completions = [trajectory.text for trajectory in trajectories]
        while not self._closed:
            try:
                rewards = await self._call(completions, prompt.row)
                return [as_score(as_optional_reward(reward), self._optional) for reward in rewards]
            except RewardFunctionError as e:
                raise RewardError(f"{where}: {e}") from e
            except (Hung, Overdue) as e:
                raise RewardError(
                    f"{where}: no reply within {self._timeout_s:g} s (reward.timeout_s)"
                ) from e
            except Interrupted:
                pass  # another call blocked the event loop; the next attempt uses a new one
        raise RewardError(f"{where}: closed")

    async def _call(self, completions: list[str], row: Mapping[str, Any]) -> list[Any]:
        # A call may change its row, as in a process.
        runner = self._loop if self._async else self._threads
        calls = [runner.call(self._function, c, copied_row(row)) for c in completions]
        values = await scores_of(calls)
        if self._async:
            return values
        # A plain function, for example a lambda, may return a coroutine.
        waiting = {
            index: self._loop.call(lambda _completion, _row, value=value: value, "", {})
            for index, value in enumerate(values)
            if inspect.iscoroutine(value)
        }
        if waiting:
            for index, value in zip(waiting, await scores_of([*waiting.values()]), strict=True):
                values[index] = value
        return values

    async def close(self) -> None:
        """Return at once. Running calls fail with RewardError, and their threads are abandoned."""
        self._closed = True
        self._threads.close()
        self._loop.close()


def _abandon(thread: threading.Thread) -> None:
    """End a thread as soon as it runs Python code, by raising SystemExit there.

    While a debugger or a coverage tool traces this thread, an exception that the other thread does
    not take makes Python 3.11 repeat one instruction forever. So it is not raised there in C code.
    """
    if sys.gettrace() is not None and not _computes(thread):
        return
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    )


def _computes(thread: threading.Thread) -> bool:
    """Return whether a thread uses the CPU now (Linux; elsewhere False)."""
    if sys.platform != "linux" or not thread.is_alive():
        return False
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    try:
        before = time.clock_gettime(clock)
        time.sleep(0.02)
        return time.clock_gettime(clock) > before
    except OSError:  # the thread has ended
        return False


class _FunctionThreads:
    """Threads that call a plain function on one completion at a time.

    Everything but `_serve` runs in the event loop of the run.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._home = asyncio.get_running_loop()
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._idle: list[_FunctionThread] = []
        self._busy: dict[_FunctionThread, tuple[asyncio.Future[Any], asyncio.TimerHandle]] = {}

    def call(self, function: Function, *arguments: Any) -> asyncio.Future[Any]:
        future = self._home.create_future()
        self._waiting.append((future, partial(_evaluate, function, *arguments)))
        self._dispatch()
        return future

    def close(self) -> None:
        for future, _ in self._waiting:
            _fail(future, Interrupted())
        self._waiting.clear()
        for thread, (future, timer) in self._busy.items():
            timer.cancel()
            _fail(future, Interrupted())
            thread.abandon()
        self._busy.clear()
        for thread in self._idle:
            thread.begin(None)
        self._idle.clear()

    def _dispatch(self) -> None:
        """Start waiting calls, as far as threads are free. Their deadlines start now."""
        while self._waiting and (self._idle or len(self._busy) < MAX_THREADS):
            future, work = self._waiting.popleft()
            if future.cancelled():
                continue
            thread = self._idle.pop() if self._idle else _FunctionThread(self._finished)
            self._busy[thread] = future, self._timer(thread, self._home.time() + self._timeout_s)
            thread.begin(work)

    def _timer(self, thread: "_FunctionThread", deadline: float) -> asyncio.TimerHandle:
        # The clock recognizes a suspended process only by a wait that is longer than planned.
        next_time = min(deadline, self._home.time() + POLL_INTERVAL_S)
        return self._home.call_at(next_time, self._check, thread, deadline)

    def _finished(self, thread: "_FunctionThread", value: Any, error: Exception | None) -> None:
        if thread not in self._busy:
            return  # abandoned
        future, timer = self._busy.pop(thread)
        timer.cancel()
        self._idle.append(thread)
        if error is not None:
            _fail(future, error)
        elif not future.done():
            future.set_result(value)
        self._dispatch()

    def _check(self, thread: "_FunctionThread", deadline: float) -> None:
        future, _ = self._busy.pop(thread)
        if self._home.time() < deadline:
            self._busy[thread] = future, self._timer(thread, deadline)
            return
        thread.abandon()
        _fail(future, Hung())
        self._dispatch()


class _FunctionThread:
    def __init__(
        self, finished: Callable[["_FunctionThread", Any, Exception | None], None]
    ) -> None:
        self._home, self._finished = asyncio.get_running_loop(), finished
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._abandoned = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="reward")
        self._thread.start()

    def begin(self, work: Callable[[], Any] | None) -> None:
        """Call `work` in the thread; None ends the thread."""
        self._work.put(work)

    def abandon(self) -> None:
        self._abandoned = True
        _abandon(self._thread)

    def _serve(self) -> None:
        with suppress(SystemExit):  # see _abandon
            while not self._abandoned and (work := self._work.get()):
                value, error = None, None
                try:
                    value = work()
                except Exception as e:
                    error = e
                with suppress(RuntimeError):  # the event loop of the run is closed
                    self._home.call_soon_threadsafe(self._finished, self, value, error)


def _evaluate(function: Function, completion: str, row: Mapping[str, Any]) -> Any:
    try:
        with explained(function):
            return function(completion, row)
    except RewardFunctionError as e:
        if "main thread" in str(e):  # for example the time limits of math-verify
            raise RewardFunctionError(
                f"{e}. A function of the program runs in a thread, which gets no signals: put it "
                "into a file, and pass reward='file.py:function', which runs in a process"
            ) from e
        raise


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():  # it may have been cancelled
        future.set_exception(error)


class _LoopThreads:
    """The event loop for async functions; another one if that is blocked beyond a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread: _LoopThread | None = None

    def call(self, function: Function, *arguments: Any) -> asyncio.Future[Any]:
        if self._thread is None or self._thread.abandoned:
            self._thread = _LoopThread(self._timeout_s)
        return self._thread.call(function, *arguments)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


class _LoopThread:
    """One event loop in a thread, with the calls that are in flight there."""

    def __init__(self, timeout_s: float) -> None:
        self.abandoned = False
        self._timeout_s = timeout_s
        self._home = asyncio.get_running_loop()
        self._calls = Calls(timeout_s + GRACE_S, self._abandon)
        self._instance: Function | None = None  # of a class
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="reward-loop")
        self._thread.start()

    def call(self, function: Function, *arguments: Any) -> asyncio.Future[Any]:
        number, future = self._calls.add()
        self._loop.call_soon_threadsafe(self._begin, number, function, arguments)
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        return future

    def close(self) -> None:
        if self._calls:
            self._calls.fail(Interrupted())
            self._abandon()
        else:
            self._post(self._loop.stop)

    def _abandon(self) -> None:
        self.abandoned = True
        self._post(self._loop.stop)
        _abandon(self._thread)  # in case the loop is blocked

    def _cancel(self, number: int) -> None:
        def cancel() -> None:
            if task := self._tasks.get(number):
                task.cancel()

        self._post(cancel)

    def _post(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback)

    def _serve(self) -> None:
        ignore_suspended_time(self._loop)
        with suppress(SystemExit):  # see _abandon
            self._loop.run_forever()
        # The request to stop may arrive after the exception; then it ends the first attempt.
        for _ in range(2):
            with suppress(SystemExit, RuntimeError):
                self._loop.run_until_complete(self._cancel_all())
                break
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)

    def _begin(self, number: int, function: Function, arguments: Any) -> None:
        task = self._loop.create_task(self._run(number, function, *arguments))
        self._tasks[number] = task

        def done(task: asyncio.Task[None]) -> None:
            del self._tasks[number]
            if task.cancelled():  # before it began: it must not count as one that hangs
                self._report(self._calls.finish, number, Interrupted())

        task.add_done_callback(done)

    async def _run(
        self,
        number: int,
        function: Callable[..., Awaitable[Any]],
        completion: str,
        row: Mapping[str, Any],
    ) -> None:
        self._report(self._calls.started, number)
        outcome: Any = Interrupted()
        try:
            function = self._made(function)
            outcome = await call_async(function, completion, row, self._timeout_s)
        except RewardFunctionError as e:
            outcome = e
        except TimeoutError:
            outcome = Overdue()
        except asyncio.CancelledError:
            outcome = RewardFunctionError("raised CancelledError")
        finally:
            self._report(self._calls.finish, number, outcome)

    def _made(self, function: Function) -> Function:
        """Return the instance of a class, made in the loop, because it may create a client."""
        if not isinstance(function, type):
            return function
        if self._instance is None:
            with explained(function):
                self._instance = instance(function)
        return self._instance

    def _report(self, report: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop of the run is closed
            self._home.call_soon_threadsafe(report, *arguments)
