"""The time of a worker's device: a clock that counts every second of it once.

A worker does one thing at a time on each of its threads, and `doing` names it. If two threads work
at the same time (placement.overlap), each gets half of the device's time. So the seconds of all
activities and the idle seconds add up to the age of the clock.

Every reply of a worker to the controller carries a report of its clock, so nothing polls it.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PREFILL, TRAINING, SYNC, SWITCHING = "prefill", "training", "sync", "switching"
REWARD, CHECKPOINT = "reward", "checkpoint"
FILL_LEVELS = 8  # of the slots of an engine: the seconds and tokens of decode steps are kept apart
DISCARDED = "discarded"  # counts tokens of aborted generations

MERGE_GAP_S, MERGED_S = 1e-3, 0.02  # of equal activities that become one event of a trace
MAX_EVENTS = 20_000  # between two reports; later ones are dropped

Event = tuple[str, float, float, int]  # name, start, seconds, number of the thread


def decoding(running: int, slots: int) -> str:
    """Return the activity of a decode step with so many sequences, by the fill of the slots."""
    return f"decode/{min(FILL_LEVELS, max(1, -(-running * FILL_LEVELS // slots)))}"


@dataclass(frozen=True, slots=True)
class ClockReport:
    started: float  # on the worker's clock; a new worker has another one
    now: float
    seconds: dict[str, float] = field(default_factory=dict)  # by activity, since `started`
    counts: dict[str, int] = field(default_factory=dict)
    events: tuple[Event, ...] = ()  # since the last report, if the clock keeps them


@dataclass(slots=True, eq=False)
class _Activity:
    name: str
    begun: float
    thread: int


class DeviceClock:
    def __init__(
        self, keep_events: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now, self._keep = now, keep_events
        self._started = self._since = now()
        self._lock = threading.Lock()
        self._active: list[_Activity] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._events: list[Event] = []
        self._threads: dict[int, int] = {}  # numbers of threads, by their identifiers

    def enter(self, name: str, instead_of: _Activity | None = None) -> _Activity:
        """Start an activity; `instead_of` pauses until it ends."""
        with self._lock:
            activity = _Activity(name, self._advance(), threading.get_ident())
            if instead_of:
                self._active.remove(instead_of)
            self._active.append(activity)
            return activity

    def leave(self, activity: _Activity, back_to: _Activity | None = None) -> None:
        with self._lock:
            now = self._advance()
            self._active.remove(activity)
            if back_to:
                self._active.append(back_to)
            if self._keep:
                self._add_event(activity, now)

    def count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds as another activity, if they were measured later (on a GPU)."""
        with self._lock:
            seconds = min(seconds, self._seconds[source])
            self._seconds[source] -= seconds
            self._seconds[target] += seconds

    def report(self) -> ClockReport:
        with self._lock:
            now, events = self._advance(), tuple(self._events)
            self._events.clear()
            return ClockReport(self._started, now, dict(self._seconds), dict(self._counts), events)

    def _advance(self) -> float:
        now = self._now()
        for activity in self._active:
            self._seconds[activity.name] += (now - self._since) / len(self._active)
        self._since = now
        return now

    def _add_event(self, activity: _Activity, now: float) -> None:
        name, begun = activity.name, activity.begun
        thread = self._threads.setdefault(activity.thread, len(self._threads))
        if self._events:
            last, start, seconds, by = self._events[-1]
            near = begun - start - seconds < MERGE_GAP_S and seconds < MERGED_S
            if near and (last, by) == (name, thread):
                self._events[-1] = (name, start, now - start, thread)
                return
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, begun, now - begun, thread))


class _Here(threading.local):
    clock: DeviceClock | None = None  # of the worker that this thread belongs to
    activity: _Activity | None = None  # that this thread is doing


_here = _Here()


def use_clock(clock: DeviceClock) -> None:
    """Let `doing` on this thread count on this clock."""
    _here.clock, _here.activity = clock, None


def current_clock() -> DeviceClock | None:
    return _here.clock


def current_activity() -> str | None:
    """Return the name of what this thread is doing."""
    return _here.activity.name if _here.activity else None


@contextmanager
def doing(name: str | None) -> Iterator[None]:
    """Name what this thread does. Nested activities interrupt the outer one."""
    clock, outer = _here.clock, _here.activity
    if clock is None or name is None:
        yield
        return
    _here.activity = clock.enter(name, outer)
    try:
        yield
    finally:
        clock.leave(_here.activity, outer)
        _here.activity = outer
