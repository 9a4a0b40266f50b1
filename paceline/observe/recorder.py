"""The results of a run, for people and programs: metrics.jsonl (one line per step), samples.jsonl
and the contents of summary.json."""

import asyncio
import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.line_file import LineFile, intact_rows
from paceline.loop import Metrics, Observer
from paceline.observe.device_meter import DeviceMeter
from paceline.observe.distributions import Distributions, Kind
from paceline.observe.flops import TrainUtilization
from paceline.observe.samples import Samples
from paceline.observe.sinks import Sinks
from paceline.observe.slow_steps import SlowSteps
from paceline.observe.trace import TraceWriter
from paceline.rollout.engine import EngineStats
from paceline.types import Group

SUMMED = (
    "sample_age_s",
    "staleness/mean",
    "queue/utilization",
    "rollout/samples",
    "rollout/tokens",
    "train/busy_s",
)


# What every summary has, because it is shown at the end of a run.
SUMMARY = (
    *("steps", "steps_per_s", "samples_per_s", "tokens_per_s", "reward_first", "reward_last"),
    *("staleness_mean", "staleness_max", "mean_sample_age_s", "sync_latency_s", "ledger"),
    *("rollout_busy_fraction", "train_busy_fraction", "memory_peak_bytes"),
)


class StepWatcher(Protocol):
    """What follows the steps, for example to compare their metrics with a prediction."""

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Recorder:
    """Observer of the loop that writes the results and passes everything on to the display.

    Steps are written and summed, not kept, because a run may have any number of them.
    """

    def __init__(
        self,
        run_dir: Path,
        length: int,
        samples: Samples,
        display: Observer | None = None,
        sinks: Sinks | None = None,
        first_step: int = 0,
        meter: DeviceMeter | None = None,
        trace: TraceWriter | None = None,
        utilization: TrainUtilization | None = None,
        watchers: Sequence[StepWatcher] = (),
    ) -> None:
        """`length`: bytes of metrics.jsonl that a checkpoint of `first_step` has recorded."""
        self._engines: Sequence[EngineStats] = ()
        self._samples, self._meter, self._trace = samples, meter, trace
        self._utilization, self._watchers = utilization, watchers
        self._display = display
        self._evaluated: Metrics = {}  # since the last step
        self._sinks = sinks or Sinks()
        # One number per step whose line is intact, including the steps before this run.
        self._rewards, self._teacher_kl = array("d"), array("d")
        self._distributions = Distributions(run_dir, first_step)
        self._file = LineFile(run_dir / "metrics.jsonl", length, locked=True)
        for row in intact_rows(self._file.path):
            self._keep(row)
        self._first_step = self._step = first_step
        self._sums: Counter[str] = Counter()  # of SUMMED
        self._slow = SlowSteps()
        self._maxima: dict[str, float] = {}  # of staleness and memory
        self._polls, self._queue_sum, self._queue_last = 0, 0.0, 0.0
        self._started = time.perf_counter()

    @property
    def length(self) -> int:
        """Bytes written so far. A checkpoint stores it, so that resuming truncates later lines."""
        return self._file.durable_length()

    @property
    def reward(self) -> float | None:
        """Mean reward of the last step."""
        return self._rewards[-1] if self._rewards else None

    def evaluation_done(self, step: int, scores: Metrics) -> None:
        """Add the scores of held-out prompts to the metrics of the next step, and show them."""
        metrics = {f"evaluation/{name}": value for name, value in scores.items()}
        self._evaluated = metrics | {"evaluation/step": float(step)}
        self._sinks.put(step, self._evaluated)
        if show := getattr(self._display, "evaluation_done", None):  # observers may lack it
            show(step, scores)

    def group_seen(self, kind: Kind, group: Group) -> None:
        """Count a group that was generated, or dropped after that."""
        self._distributions.add(kind, [group], self._step)

    def step_done(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        metrics, self._evaluated = metrics | self._evaluated, {}
        if self._meter:
            metrics |= self._meter.step().metrics()
        if self._utilization:
            metrics |= self._utilization.step(groups, metrics.get("train/busy_s", 0.0))
        if self._trace:
            self._trace.step_done(step, asyncio.get_running_loop().time())
        self._file.write({"step": step} | {name: rounded(v) for name, v in metrics.items()})
        self._file.flush()
        self._step = step
        self._keep(metrics)
        self._sums.update({name: metrics.get(name, 0.0) for name in SUMMED})
        for name, value in metrics.items():
            if name == "staleness/max" or name.startswith("memory/"):
                self._maxima[name] = max(self._maxima.get(name, 0.0), value)
        self._slow.check(step, metrics)
        for watcher in self._watchers:
            watcher.step_done(step, metrics)
        saved = self._samples.step_done(step, groups)
        self._distributions.step_done(step, groups)
        self._sinks.put(step, metrics)
        self._sinks.log_samples(step, saved)
        if self._display:
            self._display.step_done(step, metrics, groups)

    def _keep(self, metrics: Mapping[str, Any]) -> None:
        for name, kept in (("reward/mean", self._rewards), ("distill/kl", self._teacher_kl)):
            if isinstance(value := metrics.get(name), float | int):
                kept.append(value)

    def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
        self._file.check_in_place()  # also in a long step, and while generation is paused
        self._polls += 1
        self._queue_sum += queue_utilization
        self._queue_last = queue_utilization
        if self._trace:
            self._trace.collect()
        self.record_final_stats(engines)

    def record_final_stats(self, engines: Sequence[EngineStats]) -> None:
        """Record the totals of the engines; the queue utilization stays as it was."""
        self._engines = engines
        if self._display:
            self._display.engines_polled(engines, self._queue_last)

    def log_summary(self, summary: dict[str, Any]) -> None:
        """Pass the results of a run that has ended on to the sinks."""
        self._sinks.log_summary(summary)

    def close(self) -> None:
        """Close every part, also if a full disk lets one of them fail."""
        with ExitStack() as stack:  # it starts with the last one
            if self._trace:
                stack.callback(self._trace.close)
            for part in (self._sinks, self._distributions, self._samples, self._file):
                stack.callback(part.close)

    def summary(
        self, *, sync_s: Sequence[float], ledger: dict[str, Any], memory_peak_bytes: int
    ) -> dict[str, Any]:
        """Return the results of the run.

        If it was resumed, only `steps` and the rewards cover the steps before that.
        """
        rewards, sums = self._rewards, self._sums
        wall = max(time.perf_counter() - self._started, 1e-9)
        steps = self._step - self._first_step
        queue_utilization = sums["queue/utilization"] / max(1, steps)
        if self._polls:
            queue_utilization = self._queue_sum / self._polls
        rollout_busy_s = sum(e.busy_s for e in self._engines) / max(1, len(self._engines))
        last = max(1, len(rewards) // 10)
        kl, distilled = self._teacher_kl, {}
        if kl:
            distilled = {"distill_kl_first": kl[0], "distill_kl_last": float(np.mean(kl[-last:]))}
        return {
            "steps": self._step,
            "steps_this_run": steps,
            "wall_s": wall,
            # Of the first step, before any update, and of the last tenth of all steps.
            "reward_first": rewards[0] if rewards else None,
            "reward_last": float(np.mean(rewards[-last:])) if rewards else None,
            **distilled,
            "samples_per_s": sums["rollout/samples"] / wall,
            "tokens_per_s": sums["rollout/tokens"] / wall,
            "steps_per_s": steps / wall,
            "mean_sample_age_s": sums["sample_age_s"] / max(1, steps),
            "staleness_mean": sums["staleness/mean"] / max(1, steps),
            "staleness_max": int(self._maxima.get("staleness/max", 0)),
            "sync_latency_s": float(np.mean(sync_s)) if sync_s else 0.0,
            "queue_utilization": queue_utilization,
            "rollout_busy_fraction": min(1.0, rollout_busy_s / wall),
            "train_busy_fraction": min(1.0, sums["train/busy_s"] / wall),
            # Steps of more than twice the median time, by the part that took longer.
            "slow_steps": dict(self._slow.causes),
            "memory_peak_bytes": memory_peak_bytes,
            # The peak of each phase, if engine and trainer alternate on one device.
            "memory_phases": {
                name.removeprefix("memory/").removesuffix("_bytes"): int(value)
                for name, value in self._maxima.items()
                if name.startswith("memory/")
            },
            "ledger": ledger,
            **({"device_time": self._meter.summary()} if self._meter else {}),
            # None: the peak of this device is not known.
            "train_flop_utilization": self._utilization.mean if self._utilization else None,
        }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a file atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)


def rounded(value: float) -> float | None:
    """Return a rounded number, or None for nan and infinity, which JSON does not have."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if abs(value) < 1e6 else value
