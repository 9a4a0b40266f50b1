"""A coroutine on a separate thread with its event loop.

The public functions run this way, so that they work in a script, in a notebook whose event loop is
already running, and from a thread, and so that blocking code of the caller cannot delay a run.
"""

import asyncio
import atexit
import concurrent.futures.thread  # registers its hook for the end of the program before ours
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from paceline.openmp import end_idle_threads

log = logging.getLogger(__name__)

T = TypeVar("T")
# A signal that another thread receives does not wake the main thread, which handles it. So no wait
# is longer than this.
SIGNAL_INTERVAL_S = 0.2


class Background(Generic[T]):
    """A running coroutine. If the program ends first, it is cancelled."""

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        stop: Callable[[], bool] = lambda: False,
        grace_s: float = 0.0,
    ) -> None:
        """`stop` is called in the event loop on Ctrl-C: it makes the coroutine return soon.

        If it returns False, or `grace_s` are over, the coroutine is cancelled.
        """
        self._stop, self._grace_s = stop, grace_s
        self._abandoned = False  # by a second Ctrl-C
        self._future: Future[T] = Future()
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[T] = self._loop.create_task(work)
        self._ending = False
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
            if self._stopped():
                self._future.result()
            else:
                self.cancel()
        except KeyboardInterrupt:
            self._abandoned = True
            raise

    def _stopped(self) -> bool:
        """Ask the coroutine to return and wait `grace_s`; return whether it did."""
        answer: Future[bool] = Future()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: answer.set_result(self._stop()))
        deadline = time.monotonic() + self._grace_s
        while not self._future.done() and time.monotonic() < deadline:
            if answer.done() and not answer.result():
                return False
            concurrent.futures.wait([self._future], SIGNAL_INTERVAL_S)
        if not self._future.done():
            log.warning("the current step did not end within grace_s = %g s", self._grace_s)
        return self._future.done()

    async def wait(self) -> T:
        """Wait in the event loop of the caller. Cancelling this cancels the coroutine too."""
        future = asyncio.wrap_future(self._future)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.cancel)
            raise

    def when_done(self, function: Callable[[], object]) -> None:
        """Call a function after the end, from any thread."""
        self._future.add_done_callback(lambda _: function())

    def end(self, request: Callable[[], object]) -> None:
        """Call what makes the coroutine return soon, in its event loop. The program waits for it.

        Does nothing if the coroutine has ended.
        """
        self._ending = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(request)

    def cancel(self) -> None:
        """Cancel the coroutine and wait until it has cleaned up."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._join()

    def finish(self) -> None:
        """Wait if the coroutine returns soon; cancel it otherwise."""
        if self._abandoned:
            return
        self._join() if self._ending else self.cancel()

    def _join(self) -> None:
        while self._thread.is_alive():
            self._thread.join(SIGNAL_INTERVAL_S)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                result = runner.run(_result(self._task))
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


async def _result(task: "asyncio.Task[T]") -> T:
    return await task


_RUNNING: "weakref.WeakSet[Background[Any]]" = weakref.WeakSet()


def _finish_all() -> None:
    for running in list(_RUNNING):
        running.finish()


# Functions registered with atexit are called after the thread pools of asyncio.to_thread have been
# closed, which the clean-up of a run needs; threading has a hook that is called before.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
