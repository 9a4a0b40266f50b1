"""A coroutine on a separate thread with its event loop.

The public functions run this way, so that they work in a script, in a notebook whose event loop is
already running, and from a thread, and so that blocking code of the caller cannot delay a run. A
coroutine whose event loop is blocked, for example by time.sleep, cannot be cancelled: it is
abandoned, and cleans up if it ever continues.
"""

import asyncio
import atexit
import concurrent.futures.thread  # registers its hook for the end of the program before ours
import functools
import logging
import queue
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.openmp import end_idle_threads
from paceline.suspend import SuspendAwareClock

log = logging.getLogger(__name__)

T = TypeVar("T")
# A signal that another thread receives does not wake the main thread, which handles it. So no wait
# is longer than this.
SIGNAL_INTERVAL_S = 0.2
MAX_THREADS = 128  # of asyncio.to_thread; hung calls must not keep a run from its clean-up
# An event loop that does not answer for so long is abandoned when it is cancelled.
BLOCKED_S, CLEAN_UP_BLOCKED_S = 5.0, 30.0


class Background(Generic[T]):
    """A running coroutine. If the program ends first, it is cancelled."""

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        stop: Callable[[], bool] = lambda: False,
        grace_s: float = 0.0,
        key: str = "",
    ) -> None:
        """`stop` is called in the event loop on Ctrl-C: it makes the coroutine return soon.

        If it returns False, or `grace_s` are over, the coroutine is cancelled. `key` names what
        only one coroutine can use (see `wait_for_ending`).
        """
        self._stop, self._grace_s, self._key = stop, grace_s, key
        self._future: Future[T] = Future()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._task: asyncio.Task[T] = self._loop.create_task(work)
        self._ending = self._abandoned = False
        end_idle_threads()
        # A daemon, so that a second Ctrl-C ends the program even if the clean-up hangs.
        self._thread = threading.Thread(target=self._run, name="paceline", daemon=True)
        self._thread.start()
        _RUNNING.add(self)

    def result(self) -> T:
        """Wait for the result and return it. Ctrl-C ends the coroutine, a second one the wait."""
        try:
            while not self._future.done():
                concurrent.futures.wait([self._future], SIGNAL_INTERVAL_S)
        except KeyboardInterrupt:
            self.interrupt()
            raise
        except BaseException:
            self.cancel()
            raise
        return self._future.result()

    def interrupt(self) -> None:
        """End the coroutine because of Ctrl-C, and raise the error if it failed before its end."""
        try:
            if self._grace_s and self._stopped():
                self._future.result()
            else:
                self.cancel()
        except KeyboardInterrupt:
            self._abandoned = True  # the end of the program does not wait for it again
            raise

    def _stopped(self) -> bool:
        """Ask the coroutine to return and wait `grace_s`; return whether it did."""
        answer: Future[bool] = Future()
        self._post(lambda: answer.set_result(self._stop()))
        begun = time.monotonic()
        while not self._future.done() and (waited_s := time.monotonic() - begun) < self._grace_s:
            if not answer.result() if answer.done() else waited_s > BLOCKED_S:
                return False
            concurrent.futures.wait([self._future], SIGNAL_INTERVAL_S)
        if not self._future.done():
            log.warning("the current step did not end within grace_s = %g s", self._grace_s)
        return self._future.done()

    async def wait(self) -> T:
        """Wait in the event loop of the caller. Cancelling this ends the coroutine, as Ctrl-C does.

        asyncio turns Ctrl-C into a cancellation.
        """
        future = asyncio.wrap_future(self._future)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.interrupt)
            raise

    def when_done(self, function: Callable[[], object]) -> None:
        """Call a function after the end, from any thread."""
        self._future.add_done_callback(lambda _: function())

    def end(self, request: Callable[[], object]) -> None:
        """Call what makes the coroutine return soon, in its event loop. The program waits for it.

        Does nothing if the coroutine has ended.
        """
        self._ending = True
        self._post(request)

    def cancel(self) -> None:
        """Cancel the coroutine and wait until it has cleaned up, unless its loop is blocked.

        A second Ctrl-C ends the wait.
        """
        if self._abandoned:
            return
        try:
            self._post(self._task.cancel)
            self._join_or_abandon()
        except BaseException:
            self._abandoned = True  # the end of the program does not wait for it again
            raise

    def finish(self) -> None:
        """Wait if the coroutine returns soon; end it otherwise, as Ctrl-C does."""
        if not self._ending:
            with suppress(Exception):  # its error has no one left to read it
                self.interrupt()
            return
        while self._thread.is_alive() and not self._abandoned:
            self._thread.join(SIGNAL_INTERVAL_S)

    @staticmethod
    def wait_for_ending(key: str) -> None:
        """Wait for the coroutines with this key that have been asked to end."""
        for running in list(_RUNNING):
            if running._ending and running._key == key:
                running.finish()

    def abandon(self, error: BaseException) -> None:
        """Raise `error` for everyone who waits for the result, though the thread may be blocked."""
        self._abandoned = True
        self._post(self._task.cancel)
        with suppress(concurrent.futures.InvalidStateError):  # it has just ended
            self._future.set_exception(error)

    @staticmethod
    def current() -> "Background[Any] | None":
        """Return the one whose event loop runs on this thread."""
        return getattr(_THREAD, "running", None)

    def _join_or_abandon(self) -> None:
        """Wait for the thread, as long as its event loop answers."""
        clock, answered, limit_s = SuspendAwareClock(), threading.Event(), BLOCKED_S
        asked_at = clock.now()
        self._post(answered.set)
        while self._thread.is_alive() and not self._abandoned:
            self._thread.join(SIGNAL_INTERVAL_S)
            now = clock.now(waited=SIGNAL_INTERVAL_S)
            if answered.is_set():  # it cleans up now
                answered.clear()
                asked_at, limit_s = now, CLEAN_UP_BLOCKED_S
                self._post(answered.set)
            elif now - asked_at > limit_s and self._thread.is_alive():
                log.warning("gave up waiting for the run: %s", self.blocked_at())
                self.abandon(asyncio.CancelledError())

    def _post(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def blocked_at(self) -> str:
        """Say which line of which file the event loop is in."""
        return f"its event loop is blocked at {location(self._thread.ident)}"

    def _run(self) -> None:
        _THREAD.running = self
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                result = runner.run(_result(self._task))
        except BaseException as error:
            with suppress(concurrent.futures.InvalidStateError):  # it was abandoned
                self._future.set_exception(error)
        else:
            with suppress(concurrent.futures.InvalidStateError):
                self._future.set_result(result)


class DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Threads of asyncio.to_thread that neither the end of a run nor of the program waits for.

    A call that never returns, for example of a tool in an environment, can be cancelled this way.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._lock, self._count, self._free = threading.Lock(), 0, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            self._free -= 1  # below 0: calls that wait for a thread
            if self._free < 0 and self._count < MAX_THREADS:
                self._count += 1
                self._free += 1
                threading.Thread(target=self._serve, name="paceline-call", daemon=True).start()
        self._calls.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End idle threads, and busy ones after their call. Returns at once."""
        with self._lock:
            for _ in range(self._count):
                self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del call, future, function  # they may hold large objects while the thread waits
            with self._lock:
                self._free += 1


async def _result(task: "asyncio.Task[T]") -> T:
    return await task


def location(thread: int | None) -> str:
    """Return the line that a thread executes; the innermost one in the code of a user, if any."""
    frame = sys._current_frames().get(thread or 0)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    if not frames:
        return "an unknown line"
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))
    others = (*libraries, str(Path(__file__).parent), "<")
    own = [found for found in frames if not found.f_code.co_filename.startswith(others)]
    chosen = (own or frames)[0]
    return f"{chosen.f_code.co_filename}:{chosen.f_lineno} in {chosen.f_code.co_name}"


_THREAD = threading.local()
_RUNNING: "weakref.WeakSet[Background[Any]]" = weakref.WeakSet()


def _finish_all() -> None:
    for running in list(_RUNNING):
        running.finish()


# Functions registered with atexit are called after the thread pools of asyncio.to_thread have been
# closed, which the clean-up of a run needs; threading has a hook that is called before.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
