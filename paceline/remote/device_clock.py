"""The time of a worker's device: a clock that counts every second of it once.

A worker does one thing at a time on each of its threads, and `doing` names it. If two threads work
at the same time (placement.overlap), each gets half of the device's time. So the seconds of all
activities and the idle seconds add up to the age of the clock.

Replies of a worker to the controller carry reports of its clock, so nothing polls it. Engines enter
and leave an activity in every decode step, so that costs as little as it can.
"""

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

PREFILL, TRAINING, SYNC, SWITCHING = "prefill", "training", "sync", "switching"
REWARD, CHECKPOINT = "reward", "checkpoint"
FILL_LEVELS = 8  # of the slots of an engine: the seconds and tokens of decode steps are kept apart
_DECODING = tuple(f"decode/{level}" for level in range(FILL_LEVELS + 1))
DISCARDED = "discarded"  # counts tokens of aborted generations
REPORT_INTERVAL_S = 0.02  # of the replies that need not carry a report

MERGE_GAP_S, MERGED_S = 1e-3, 0.02  # of equal activities that become one event of a trace
MAX_EVENTS = 20_000  # between two reports; later ones are dropped

Event = tuple[str, float, float, int]  # name, start, seconds, number of the thread


def decoding(running: int, slots: int) -> str:
    """Return the activity of a decode step with so many sequences, by the fill of the slots."""
    return _DECODING[min(FILL_LEVELS, -(-running * FILL_LEVELS // slots)) or 1]


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
        self._reported = -math.inf
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

    def leave(self, activity: _Activity, back_to: _Activity | None = None, count: int = 0) -> None:
        """End an activity that has made `count` tokens."""
        with self._lock:
            now = self._advance()
            self._active.remove(activity)
            if back_to:
                self._active.append(back_to)
            if count:
                self._counts[activity.name] += count
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
            self._reported = now
            return ClockReport(self._started, now, dict(self._seconds), dict(self._counts), events)

    def due_report(self) -> ClockReport | None:
        """Return a report if the last one is not recent."""
        return self.report() if self._now() - self._reported >= REPORT_INTERVAL_S else None

    def _advance(self) -> float:
        now, active = self._now(), self._active
        if active:
            seconds = (now - self._since) / len(active)
            for activity in active:
                self._seconds[activity.name] += seconds
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


class doing:  # a context manager that reads like a function
    """Name what this thread does. Nested activities interrupt the outer one.

    `count`: the tokens that it made, to be set inside.
    """

    __slots__ = ("_activity", "_clock", "_name", "_outer", "count")

    def __init__(self, name: str | None) -> None:
        self._name, self.count = name, 0

    def __enter__(self) -> "doing":
        self._clock = clock = _here.clock if self._name is not None else None
        if clock is not None and self._name is not None:
            self._outer = _here.activity
            self._activity = _here.activity = clock.enter(self._name, self._outer)
        return self

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.leave(self._activity, self._outer, self.count)
            _here.activity = self._outer
