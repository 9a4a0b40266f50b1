"""Metrics sinks: custom code that gets the metrics of each step.

Every sink has a thread and a queue, so that it cannot delay the run. A sink that raises is reported
once and gets no more metrics.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import SINKS
from paceline.errors import ConfigError
from paceline.plugins import Plugin, PluginError, call_by_name

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # for all sinks together, at the end of a run
MAX_BEHIND = 1000  # steps in a queue


class Sink:
    """A function of (step, metrics), or an object that also has `close()`, on its own thread."""

    def __init__(self, name: str, function: Callable[[int, dict[str, float]], Any]) -> None:
        self.name, self._function = name, function
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MAX_BEHIND)
        self._disabled = False
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step, without waiting."""
        if self._disabled:
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._disable(f"is {MAX_BEHIND} steps behind")

    def end(self) -> None:
        """Let the thread end after the metrics that are in the queue."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._disabled = True  # the thread ends by itself

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning(
                "sink %r has not finished within %g s; its last metrics may be missing",
                self.name,
                CLOSE_TIMEOUT_S,
            )

    def _run(self) -> None:
        while not self._disabled and (item := self._queue.get()) is not None:
            self._call(self._function, *item)
        close = getattr(self._function, "close", None)
        if close is not None:
            self._call(close)

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            log.debug("sink %r failed", self.name, exc_info=True)
            self._disable(f"raised {type(error).__name__}: {error}")

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

    def close(self) -> None:
        for sink in self._sinks:
            sink.end()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for sink in self._sinks:
            sink.join(max(0.0, deadline - time.monotonic()))


def open_sinks(track: Sequence[Plugin], run_dir: Path, config: dict[str, Any]) -> Sinks:
    """Make the sinks. A class is made with those of `run_dir` and `config` that it takes."""
    functions = [_make(plugin, run_dir, config) for plugin in track]  # all, before a thread starts
    return Sinks([Sink(str(plugin), f) for plugin, f in zip(track, functions, strict=True)])


def _make(plugin: Plugin, run_dir: Path, config: dict[str, Any]) -> Callable[..., Any]:
    name = f"track = {str(plugin)!r}"
    try:
        function = plugin.load(SINKS)
        if isinstance(function, type):
            function = call_by_name(function, {"run_dir": run_dir, "config": config})
    except PluginError as problem:
        raise ConfigError(f"{name} {problem}") from problem
    except Exception as e:
        raise ConfigError(f"{name} raised {type(e).__name__} when it was made: {e}") from e
    if not callable(function):
        raise ConfigError(f"{name} is not callable; expected a method __call__(step, metrics)")
    return function
