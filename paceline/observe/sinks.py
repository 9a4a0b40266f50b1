"""Metrics sinks: trackers and custom code that get the metrics of each step.

Every sink has a thread and a queue, so that it cannot delay the run. A sink that raises is reported
once and gets no more metrics.
"""

import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import SINKS, TRACKERS
from paceline.errors import ConfigError
from paceline.observe.trackers import Tracker
from paceline.plugins import FAILURES, Plugin, PluginError, call_by_name
from paceline.printable import describe_error

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # for all sinks together, at the end of a run
MAX_BEHIND = 1000  # calls in a queue; a step makes one, and one more if it saves samples


class Sink:
    """A function of (step, metrics), on its own thread.

    It may be an object that also has `log_samples(step, groups)`, `log_summary(summary)` or
    `close()`.
    """

    def __init__(self, name: str, function: Callable[[int, dict[str, float]], Any]) -> None:
        self.name, self._function = name, function
        self._queue: queue.Queue[tuple[Callable[..., Any], Any] | None] = queue.Queue(MAX_BEHIND)
        self._disabled = False
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step, without waiting."""
        self._put(self._function, step, dict(metrics))

    def put_for(self, method: str, *args: Any) -> None:
        """Pass on what only some sinks have a method for, without waiting."""
        if callable(function := getattr(self._function, method, None)):
            self._put(function, *args)

    def _put(self, function: Callable[..., Any], *args: Any) -> None:
        if self._disabled:
            return
        try:
            self._queue.put_nowait((function, args))
        except queue.Full:
            self._disable(f"is too slow: {MAX_BEHIND} calls wait for it")

    def end(self) -> None:
        """Let the thread end after the metrics that are in the queue."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._disabled = True  # the thread ends by itself

    def join(self, ended: float) -> None:
        """Wait for the thread. `ended`: when all sinks were asked to end."""
        limit: float = getattr(self._function, "close_timeout_s", CLOSE_TIMEOUT_S)
        self._thread.join(max(0.0, ended + limit - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "sink %r has not finished within %g s; its last metrics may be missing",
                self.name,
                limit,
            )

    def _run(self) -> None:
        while not self._disabled and (item := self._queue.get()) is not None:
            function, args = item
            self._call(function, *args)
        close = getattr(self._function, "close", None)
        if close is not None:
            self._call(close)

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except FAILURES as error:
            log.debug("sink %r failed", self.name, exc_info=True)
            self._disable(f"raised {describe_error(error)}")

    def _disable(self, reason: str) -> None:
        if not self._disabled:
            self._disabled = True
            log.warning("sink %r %s; it gets no more metrics in this run", self.name, reason)


class Sinks:
    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = sinks

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.put(step, metrics)

    def log_samples(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        for sink in self._sinks:
            sink.put_for("log_samples", step, groups)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.put_for("log_summary", dict(summary))

    def close(self) -> None:
        for sink in self._sinks:
            sink.end()
        ended = time.monotonic()
        for sink in self._sinks:
            sink.join(ended)


def open_sinks(
    track: Sequence[Plugin], run_dir: Path, config: dict[str, Any], goes_back: bool = False
) -> Sinks:
    """Make the sinks. A class is made with those of `run_dir` and `config` that it takes.

    `goes_back`: the run abandons steps that it has made, so trackers begin a new run.
    """
    functions = [  # all, before a thread starts
        Tracker(str(plugin), run_dir, config, goes_back)
        if str(plugin) in TRACKERS
        else _make(plugin, run_dir, config)
        for plugin in track
    ]
    return Sinks([Sink(str(plugin), f) for plugin, f in zip(track, functions, strict=True)])


def _make(plugin: Plugin, run_dir: Path, config: dict[str, Any]) -> Callable[..., Any]:
    name = f"track = {str(plugin)!r}"
    try:
        function = plugin.load(SINKS)
        if isinstance(function, type):
            function = call_by_name(function, {"run_dir": run_dir, "config": config})
    except PluginError as problem:
        raise ConfigError(f"{name} {problem}") from problem
    except FAILURES as e:
        raise ConfigError(f"{name} raised {describe_error(e)} (when it was made)") from e
    if not callable(function):
        raise ConfigError(f"{name} is not callable; expected a method __call__(step, metrics)")
    if wrong := _call_problem(function):
        raise ConfigError(f"{name} {wrong}; expected a function of (step, metrics), not async")
    return function


def _call_problem(function: Callable[..., Any]) -> str:
    """Return why a function cannot be called with a step and metrics; nothing if it can."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    ):
        return "is async"
    try:
        inspect.signature(function).bind(0, {})
    except ValueError:  # a built-in without a signature
        return ""
    except TypeError as error:
        return f"cannot be called: {error}"
    return ""
