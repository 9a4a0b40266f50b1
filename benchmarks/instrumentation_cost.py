"""What the device-time ledger and the trace cost: the fraction of train steps per second.

    python benchmarks/instrumentation_cost.py [--rounds 120] [--model tiny]

A small model is trained on a CPU (or one GPU) with short completions, where every decode step and
message weighs most. Each mode is one run, in which the instrumentation is switched every few steps:
"off" (the clocks of the workers, the timeline and the ledger do nothing), "ledger" (as by default)
or "trace" (ledger and trace). A round has a block of steps of each in random order, so that slow
changes of the machine's speed cancel out. A variant's time is the mean of its steps without the
fastest and the slowest tenth; its cost is 1 minus the ratio of "off" and that. The 95 % interval is
that of a bootstrap of the rounds. The CPU time of the process is compared in the same way. Each
worker has one thread: several would wait for each other whenever a core does something else.

The workers are threads of this process, so that they can be switched here; with a GPU, they are
made threads too. Exit code 1 if the ledger or the trace costs more than the limit of 2 %.
"""

import asyncio
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.report import RESULTS, circumstances, command_line, device, machine, write
from paceline.config import load_config
from paceline.observe.recorder import Recorder
from paceline.observe.recording import Recording
from paceline.remote import device_clock
from paceline.remote.device_clock import DeviceClock
from paceline.run import train
from paceline.timeline import Timeline
from paceline.workers.local import LocalCluster

LIMIT = 0.02
MODES = {
    "hybrid sync": [],
    "fully async, overlapping": [
        "placement.overlap=true", "schedule.max_staleness=2", "schedule.on_sync=swap",
    ],
}  # fmt: skip
OFF, LEDGER, TRACE = VARIANTS = ("off", "ledger", "trace")
BLOCK = 3  # steps
WARM_UP = 6  # blocks
TRIMMED = 0.1  # fraction of the fastest and of the slowest steps
RESAMPLES = 1000  # of the bootstrap

FloatArray = NDArray[np.float64]
Times = dict[str, FloatArray]  # seconds of steps by variant, [round, step of the block]


class Switch:
    """Switches the instrumentation of a run between its steps, and measures each block of steps."""

    def __init__(self, rounds: int) -> None:
        order = random.Random(0)
        self.blocks = [*VARIANTS * (WARM_UP // len(VARIANTS))]
        for _ in range(rounds):
            self.blocks += order.sample(VARIANTS, len(VARIANTS))
        self.variant = TRACE  # of the start
        self.wall: list[float] = []  # at the end of each step
        self.cpu: list[float] = []
        self._clocks: list[DeviceClock] = []

    @property
    def steps(self) -> int:
        return BLOCK * (len(self.blocks) + 1)  # the first block starts the run

    def times(self, ends: list[float]) -> Times:
        """Return the seconds of all steps after the warm-up, by variant."""
        blocks = np.diff(ends[BLOCK - 1 :]).reshape(len(self.blocks), BLOCK)
        kind = np.array(self.blocks)
        return {name: blocks[WARM_UP:][kind[WARM_UP:] == name] for name in VARIANTS}

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Make every part of the instrumentation look at this switch."""
        with ExitStack() as stack:
            for owner, name in (
                *((DeviceClock, name) for name in ("report", "due_report")),
                *((Timeline, name) for name in ("enter", "group")),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._unless_off(owner, name)))
            stack.enter_context(mock.patch.object(device_clock, "_here", self._clock_of_thread()))
            for owner, wrap in (
                (DeviceClock, self._keeping(DeviceClock.__init__)),
                (Recording, self._recording(Recording.__init__)),
            ):
                stack.enter_context(mock.patch.object(owner, "__init__", wrap))
            step_done = self._step_done(Recorder.step_done)
            stack.enter_context(mock.patch.object(Recorder, "step_done", step_done))
            yield

    def _unless_off(self, owner: type, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(instance: Any, *args: Any) -> Any:
            return original(instance, *args) if self.variant != OFF else None

        return call

    def _clock_of_thread(self) -> threading.local:
        switch = self

        class Here(threading.local):
            """A thread's clock. An activity that began before a switch also ends on it."""

            activity: Any = None
            real: DeviceClock | None = None

            @property
            def clock(self) -> DeviceClock | None:
                return self.real if switch.variant != OFF else None

            @clock.setter
            def clock(self, clock: DeviceClock | None) -> None:
                self.real = clock

        return Here()

    def _keeping(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(clock: DeviceClock, *args: Any, **named: Any) -> None:
            original(clock, *args, **named)
            self._clocks.append(clock)

        return init

    def _recording(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(recording: Any, *args: Any) -> None:
            original(recording, *args)
            self._recording_now = recording

        return init

    def _step_done(self, original: Callable[..., None]) -> Callable[..., None]:
        def step_done(recorder: Recorder, step: int, *args: Any) -> None:
            original(recorder, step, *args)
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())
            if step % BLOCK == 0 and step < self.steps:
                self._set(self.blocks[step // BLOCK - 1])

        return step_done

    def _set(self, variant: str) -> None:
        recording = cast(Any, self._recording_now)
        recorder, timeline = recording.recorder, recording.timeline
        traced = recording._trace if variant == TRACE else None
        if self.variant == OFF:  # it does not know the groups that ended since
            timeline._groups.clear()
            timeline._stages.clear()
        timeline._tracer = recorder._trace = traced
        recorder._meter = recording._meter if variant != OFF else None
        for clock in cast(list[Any], self._clocks):
            clock._keep = variant == TRACE
        self.variant = variant


def run(model: str, mode: str, rounds: int) -> Switch:
    switch = Switch(rounds)
    settings = [
        *("data.task=copy:4", "algorithm.name=grpo", "groups_per_step=8", "group_size=8"),
        *("rollout.max_response_length=32", f"model={model}", f"steps={switch.steps}"),
        *("placement.threads=1", *MODES[mode]),
        # The same policy in every block; no checkpoint in one of them.
        *("train.learning_rate=0", "save_samples=0", "save_every=0", "trace=true"),
    ]
    with tempfile.TemporaryDirectory() as folder, switch.patched():
        asyncio.run(train(load_config(None, [*settings, f"run_dir={folder}/run"])))
    return switch


def cost(times: Times, variant: str) -> dict[str, float]:
    """Return the cost of a variant relative to "off", with its 95 % interval."""
    off, on = times[OFF], times[variant]
    numbers = np.random.default_rng(0)
    samples = []
    for _ in range(RESAMPLES):
        rounds = numbers.integers(0, len(on), len(on))
        samples.append(1 - _mean(off[rounds]) / _mean(on[rounds]))
    low, high = np.quantile(samples, (0.025, 0.975))
    found = {"cost": 1 - _mean(off) / _mean(on), "low": float(low), "high": float(high)}
    return {name: round(value, 4) for name, value in found.items()}


def _mean(seconds: FloatArray) -> float:
    """Return the mean without the fastest and the slowest values."""
    values = np.sort(seconds, axis=None)
    cut = round(TRIMMED * len(values))
    return float(values[cut : len(values) - cut].mean())


def measure(model: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in MODES:
        switch = run(model, mode, rounds)
        wall, cpu = switch.times(switch.wall), switch.times(switch.cpu)
        found[mode] = {
            "steps_per_s": {name: round(1 / _mean(wall[name]), 3) for name in VARIANTS},
            "cost": {name: cost(wall, name) for name in (LEDGER, TRACE)},
            "cpu_cost": {name: cost(cpu, name) for name in (LEDGER, TRACE)},
        }
        print(json.dumps({mode: found[mode]}), flush=True)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--model", default="tiny")
    args = parser.parse_args()
    logging.getLogger("paceline").setLevel(logging.ERROR)
    # Without dedicated GPUs, the only worker is a thread of this process.
    with mock.patch.object(LocalCluster, "gpus", lambda *_: []):
        found = measure(args.model, args.rounds)
    report = circumstances() | {
        "machine": f"{device()}, {machine()}",
        "versions": {"torch": torch.__version__},
        "model": args.model,
        "rounds": args.rounds,
        "steps_of_a_block": BLOCK,
        "limit": LIMIT,
        "modes": found,
    }
    write(RESULTS / "instrumentation_cost.json", report)
    worst = max(cost["cost"] for mode in found.values() for cost in mode["cost"].values())
    print(f"highest cost {worst:.1%}, limit {LIMIT:.0%}")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
