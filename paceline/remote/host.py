"""The worker's side of a call: one loop that answers calls and runs its parts in between.

A host runs in a separate process or on a thread of the controller; the loop is the same. Everything
in it happens one after the other, so roles of one pool alternate, and weights change only between
decode steps. Concurrent parts have a separate loop on a second thread.
"""

import atexit
import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from paceline.printable import log_to_stderr
from paceline.remote.device_clock import DeviceClock, doing, use_clock
from paceline.remote.message import Call, Deferred, Event, Reply, pickled, portable
from paceline.remote.parent import end_with_parent
from paceline.remote.parts import Parts, clock_of, concurrent_parts
from paceline.remote.peak import peak_memory
from paceline.remote.stacks import write_stacks_on_signal

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.002  # of deferred replies
# A worker's thread takes the interpreter lock between any two operations; with the default interval
# of 5 ms it would wait for the other threads of its process.
SWITCH_S = 2e-4


class Channel(Protocol):
    def poll(self, timeout: float | None) -> bool: ...
    def recv(self) -> Any: ...
    def send(self, message: Any) -> None: ...


class ThreadChannel:
    """The worker's end of two queues, for a worker on a thread."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._next: list[Any] = []

    def poll(self, timeout: float | None) -> bool:
        if not self._next:
            try:
                self._next.append(
                    self.inbox.get(timeout=timeout) if timeout != 0 else self.inbox.get_nowait()
                )
            except queue.Empty:
                return False
        return True

    def recv(self) -> Any:
        self.poll(None)
        return self._next.pop()

    def send(self, message: Any) -> None:
        self.outbox.put(message)


class PipeChannel:
    """The worker's end of a pipe. Several threads may send."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe, self._sending = pipe, threading.Lock()
        self.poll, self.recv = pipe.poll, pipe.recv

    def send(self, message: Any) -> None:
        data = pickled(ForkingPickler.dumps, message)
        with self._sending:
            self._pipe.send_bytes(data)


class Lane(ThreadChannel):
    """The channel of one of several threads that share the connection to the controller."""

    def __init__(self, channel: Channel, sending: threading.Lock) -> None:
        super().__init__()
        self._channel, self._sending = channel, sending

    def send(self, message: Any) -> None:
        with self._sending:
            self._channel.send(message)


def serve_parts(channel: Channel, parts: Mapping[str, Any]) -> None:
    """Serve all parts, on two threads if some are concurrent. The first error ends it."""
    concurrent, clock = concurrent_parts(parts), clock_of(parts)
    if not concurrent:
        return serve(channel, parts, clock)
    sys.setswitchinterval(SWITCH_S)
    sending = threading.Lock()
    first, second = Lane(channel, sending), Lane(channel, sending)
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def route() -> None:
        while (call := channel.recv()) is not None:
            (second if call.part in concurrent else first).inbox.put(call)
        for lane in (first, second):
            lane.inbox.put(None)

    def run(work: Callable[[], None]) -> None:
        try:
            work()
            ends.put(None)
        except BaseException as error:
            ends.put(error)

    works = {
        "first": partial(
            serve, first, {k: v for k, v in parts.items() if k not in concurrent}, clock
        ),
        "second": partial(
            serve, second, {k: v for k, v in parts.items() if k in concurrent}, clock
        ),
        "router": route,
    }
    for name, work in works.items():
        label = f"{threading.current_thread().name}-{name}"
        threading.Thread(target=run, args=(work,), name=label, daemon=True).start()
    for _ in works:
        if (error := ends.get()) is not None:
            raise error


def serve(channel: Channel, parts: Mapping[str, Any], clock: DeviceClock | None = None) -> None:
    """Answer calls and run parts until the controller sends None or is gone (EOFError).

    A part is any object whose public methods can be called. If it has a method `work`, that runs
    between calls: it does one unit of work and returns what it produced, or None if it is idle.
    """
    clock = clock or clock_of(parts)
    use_clock(clock)
    workers = {role: part for role, part in parts.items() if hasattr(part, "work")}
    activities = {role: getattr(part, "activities", {}) for role, part in parts.items()}
    busy = True  # a part may have work before the first call
    open_calls: list[tuple[Call, Deferred]] = []
    while True:
        if channel.poll(0 if busy else POLL_INTERVAL_S if open_calls else None):
            call = channel.recv()
            if call is None:
                return
            activity = activities.get(call.part, {}).get(call.method)
            with doing(activity):
                reply = _reply(call, partial(_perform, call, parts))
            if isinstance(reply.value, Deferred):
                open_calls.append((call, reply.value))
            elif isinstance(reply.value, Future):
                reply.value.add_done_callback(partial(_reply_later, channel, call))
            else:
                # The end of an activity changes the ledger; the rest may be reported later.
                now = activity or call.part == "host"
                report = clock.report() if now else clock.due_report()
                _send(channel, call, replace(reply, clock=report) if report else reply)
            busy = True
            continue
        busy = False
        for call, later in [(call, later) for call, later in open_calls if later.done()]:
            open_calls.remove((call, later))
            with doing(activities[call.part].get(call.method)):
                reply = _reply(call, later.result)
            _send(channel, call, replace(reply, clock=clock.report()))
        for role, part in workers.items():
            produced = part.work()
            if produced is not None:
                busy = True
                if produced:
                    channel.send(Event(role, produced))


def _perform(call: Call, parts: Mapping[str, Any]) -> Any:
    return getattr(parts[call.part], call.method)(*call.args)


def _reply(call: Call, work: Callable[[], Any]) -> Reply:
    try:
        return Reply(call.id, work())
    except Exception as error:
        log.exception("%s.%s failed", call.part, call.method)
        return Reply(call.id, error=portable(error))


def _reply_later(channel: Channel, call: Call, done: "Future[Any]") -> None:
    with contextlib.suppress(OSError):  # the controller is gone, which the host notices itself
        _send(channel, call, _reply(call, done.result))


def _send(channel: Channel, call: Call, reply: Reply) -> None:
    """Send a reply, or an error in its place if its value cannot be pickled."""
    try:
        channel.send(reply)
    except OSError:
        raise  # the controller is gone
    except Exception as error:  # pickling runs code of the value, which raises anything
        kind = type(reply.value)
        problem = TypeError(
            f"{call.part}.{call.method} returned a {kind.__module__}.{kind.__qualname__}, which "
            f"cannot be pickled: {error}"
        )
        log.error("%s", problem)
        channel.send(replace(reply, value=None, error=problem))


class BusyClock:
    """Seconds that a part has spent computing."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


class ProcessStats:
    def pid(self) -> int:
        return os.getpid()

    def peak_memory(self) -> int:
        return peak_memory()


def build_and_serve(channel: Channel) -> None:
    """Build the parts that the first message (build, arguments) asks for, then serve them."""
    build, args = channel.recv()  # imports torch and transformers
    gc.enable()  # see main
    try:
        parts = build(*args)
    except Exception as error:
        log.exception("the worker failed to start")
        return channel.send(Reply(0, error=portable(error)))
    gc.freeze()  # collections then skip what the libraries hold, which takes tenths of a second
    channel.send(Reply(0))
    parts = Parts({**parts, "host": ProcessStats()}, concurrent_parts(parts), clock_of(parts))
    serve_parts(channel, parts)


def main() -> None:
    """Run a worker process: `python -m paceline.remote.host FD PARENT_PID`."""
    gc.disable()  # an eighth of the time of large imports, which leave little garbage
    end_with_parent(int(sys.argv[2]))
    # The controller stops the workers in order. Schedulers send SIGTERM to all processes, and a
    # terminal that is closed SIGHUP. They get a function instead of SIG_IGN, which processes that
    # this one starts would inherit. With nohup, they should.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    write_stacks_on_signal()
    log_to_stderr()
    channel = PipeChannel(Connection(int(sys.argv[1])))
    # These errors mean that the controller has exited.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        build_and_serve(channel)


def leave() -> None:
    """Exit at once: destroying all objects of torch takes seconds on a busy machine."""
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    leave()
