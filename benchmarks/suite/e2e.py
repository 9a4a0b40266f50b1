"""The whole system end to end in its smallest real form, checked part by part: what `./run_e2e_test.sh` runs.

The guide's minimal recipe runs its two steps; then the same folder is continued for some more, and paused and resumed meanwhile. Real
model, engines in processes of their own, real queue, versions, losses, checkpoints, ledger. The run folder stays only when a check fails.
The exit code is 0 when every check holds, 1 when one fails, 2 when the environment asks for something that does not exist.
"""

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.suite.choice import Choice, take
from benchmarks.suite.criteria import Verdict, ledger
from benchmarks.suite.memory import MB, Memory
from benchmarks.suite.watcher import Pause, Watcher
from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError, ModelError, PacelineError, first_error
from paceline.queue.message_queue import MessageQueue, MessageQueueClient
from paceline.run import train

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "e2e_minimal.toml"
BATCH, FIRST_STEPS, ALL_STEPS = 4, 2, 14  # the first two are the recipe's own
ENGINES = 2  # at least, so that "every engine" means something
LIMIT_S = 600.0
POLL_INTERVAL_S = 0.5
CONTEXT_MB = 200  # the least a process takes of a GPU it computes on

console = Console(soft_wrap=True, highlight=False)


class Run:
    """One run of the recipe, watched, and paused in the middle if so asked."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.watcher = Watcher()
        self.pause: Pause | None = None
        self.memory = Memory(os.getpid())
        self.summary: dict[str, Any] = {}

    async def go(self, pause: bool = False) -> "Run":
        self.memory.look()
        try:
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(train(self.config, self.watcher.begin))
                looking = tasks.create_task(self._look())
                training.add_done_callback(lambda _: looking.cancel())
                training.add_done_callback(self.watcher.end)
                pausing = (
                    tasks.create_task(
                        self.watcher.pause_and_resume(Path(self.config.run_dir), looks=2)
                    )
                    if pause
                    else None
                )
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        self.summary = training.result()
        self.pause = pausing.result() if pausing else None
        return self

    async def _look(self) -> None:
        while True:
            await asyncio.to_thread(self.memory.look)
            await asyncio.sleep(POLL_INTERVAL_S)


def samples(run: Run) -> Verdict:
    steps, config = run.summary["steps_this_run"], run.config
    consumed = int(sum(step["rollout/samples"] for step in run.watcher.steps))
    wanted = steps * config.groups_per_step * config.group_size
    issued = run.summary["ledger"]["issued"] * config.group_size
    seen = f"{issued} asked for, {run.watcher.tokens} tokens made, {consumed} samples consumed in {steps} steps"
    return Verdict(
        "samples made and consumed",
        0 < consumed == wanted <= issued and run.watcher.tokens > 0,
        seen,
    )


def versions(run: Run, engines: int) -> Verdict:
    found = [engine.version for engine in run.watcher.engines]
    latency = run.summary["sync_latency_s"] * 1000
    seen = f"{len(found)} engine{'s' if len(found) > 1 else ''} at {found} after step {run.config.steps}, {latency:.1f} ms a hand-over"
    return Verdict("versions advanced on every engine", found == [run.config.steps] * engines, seen)


def on_gpus(run: Run, workers: int) -> Verdict:
    """A process that computes on a GPU holds some of its memory, whatever its model."""
    grown = run.memory.gpu_growth()
    seen = f"{workers} workers took {grown / MB:,.0f} MB of GPU memory"
    return Verdict("trainer and engines are on GPUs", grown > workers * CONTEXT_MB * MB, seen)


def paused(pause: Pause) -> Iterator[Verdict]:
    seen = f"pause_rollout {pause.paused}, resume_rollout {pause.resumed}"
    yield Verdict("pause and resume answered true", pause.paused and pause.resumed, seen)
    seen = f"{pause.tokens} tokens in {pause.watched_s:.1f} s of pause, new ones {pause.resume_s:.1f} s after resume"
    yield Verdict("pause and resume took effect", pause.held and pause.tokens == 0, seen)


def resumed(run: Run) -> Verdict:
    lines = (Path(run.config.run_dir) / "metrics.jsonl").read_text().splitlines()
    found = [int(json.loads(line)["step"]) for line in lines]
    ok = run.watcher.first_step == FIRST_STEPS and found == list(range(1, ALL_STEPS + 1))
    seen = f"continued after step {run.watcher.first_step}, metrics have steps {found[0]} to {found[-1]}"
    return Verdict("checkpoint resumed", ok, seen)


def books(run: Run) -> Verdict:
    lines = (Path(run.config.run_dir) / "ledger.jsonl").read_text().splitlines()
    return ledger(
        map(json.loads, lines), run.summary["ledger"], run.config.steps * run.config.groups_per_step
    )


async def stale_refused() -> Verdict:
    """The guide's example on the real queue: with a threshold of 3, a sample of version 1 is not for a trainer at version 5."""
    queue = MessageQueue(max_queue_size=100, max_staleness=3)
    client = MessageQueueClient(queue)
    await client.put_samples("made at version 1", param_version=1)
    try:
        got = await client.get_samples(current_param_version=5, timeout_s=0.05)
    except TimeoutError:
        got = []
    await client.put_samples("made at version 2", param_version=2)
    fresh = await client.get_samples(current_param_version=5, timeout_s=1.0)
    ok = got == [] and fresh == ["made at version 2"] and queue.counts.dropped_stale == 1
    seen = f"threshold 3, trainer at version 5: version 1 {'refused' if not got else 'handed out'}, version 2 handed out"
    return Verdict("stale sample refused", ok, seen)


def nobody_left() -> Verdict:
    """Once the runs are over, no process of theirs is."""
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    _, left = psutil.wait_procs(children, timeout=10)
    return Verdict("no process left behind", not left, f"{len(left)} left")


async def checks(choice: Choice, folder: Path) -> list[Verdict]:
    """All of them, each shown as soon as it is known."""
    found: list[Verdict] = []

    def show(verdict: Verdict) -> None:
        found.append(verdict)
        console.print(str(verdict), style=None if verdict.ok else "bold red", markup=False)

    settings = [*choice.settings(BATCH, ENGINES), f"run_dir={folder}"]
    show(await stale_refused())
    first = await Run(load_config(RECIPE, settings)).go()
    show(samples(first))
    show(versions(first, choice.engines(ENGINES)))
    if choice.gpus:
        show(on_gpus(first, choice.train_ranks + choice.engines(ENGINES)))
    second = await Run(load_config(RECIPE, [*settings, f"total_training_steps={ALL_STEPS}"])).go(
        pause=True
    )
    show(resumed(second))
    assert second.pause
    for verdict in paused(second.pause):
        show(verdict)
    show(samples(second))
    show(versions(second, choice.engines(ENGINES)))
    show(books(second))
    show(nobody_left())
    return found


def main() -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("paceline").setLevel(logging.ERROR)
    begun = time.monotonic()
    folder = Path("runs") / time.strftime("e2e-%Y%m%d-%H%M%S")
    try:
        choice = take()
        console.print(f"end to end: {choice}; run folder {folder}")
        verdicts = asyncio.run(asyncio.wait_for(checks(choice, folder), LIMIT_S))
    except (ConfigError, ModelError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 2
    except PacelineError as error:
        console.print(
            f"FAIL  the run ended with {type(error).__name__}: {error}",
            style="bold red",
            markup=False,
        )
        return 1
    except TimeoutError:
        console.print(
            f"FAIL  not done within {LIMIT_S:g} s; the logs are in {folder}/logs",
            style="bold red",
            markup=False,
        )
        return 1
    failed = sum(not verdict.ok for verdict in verdicts)
    if not failed:
        shutil.rmtree(folder)
    said = (
        f"{failed} of {len(verdicts)} checks failed; the run is in {folder}"
        if failed
        else f"all {len(verdicts)} checks hold"
    )
    console.print(
        f"{said}; {time.monotonic() - begun:.0f} s", style="bold red" if failed else "bold green"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
