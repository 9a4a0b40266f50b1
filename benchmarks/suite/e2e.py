"""The end-to-end test of `./run_e2e_test.sh`: the smallest real run, checked part by part.

The recipe e2e_minimal.toml runs its two steps; a second run continues it for more steps and is
paused and resumed meanwhile. Model, engine processes, queue, checkpoints and ledger are real. The
run directory is kept only if a check fails. The exit code is 0 if every check passes, 1 if one
fails, and 2 if an environment variable is invalid.
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

from benchmarks.report import read_metrics
from benchmarks.suite.choice import Choice, choice_from_environment
from benchmarks.suite.criteria import CheckResult, ledger
from benchmarks.suite.memory import MB, Memory
from benchmarks.suite.watcher import Pause, Watcher, train_watched
from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError, ModelError, PacelineError
from paceline.queue.message_queue import MessageQueue, MessageQueueClient

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "e2e_minimal.toml"
BATCH, FIRST_STEPS, ALL_STEPS = 4, 2, 14  # the recipe has batch size 4 and 2 steps
MIN_ENGINES = 2  # so that checks of every engine cover more than one
LIMIT_S = 600.0
POLL_INTERVAL_S = 0.5
CONTEXT_MB = 200  # minimum GPU memory of a process that uses the GPU

console = Console(soft_wrap=True, highlight=False)


class Run:
    """One observed run of the recipe, with or without a pause."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.watcher = Watcher()
        self.pause: Pause | None = None
        self.memory = Memory(os.getpid())
        self.summary: dict[str, Any] = {}

    async def go(self, pause: bool = False) -> "Run":
        self.memory.poll()
        polling = asyncio.create_task(self._poll_memory())
        try:
            self.summary, self.pause = await train_watched(self.config, self.watcher, pause)
        finally:
            polling.cancel()
        return self

    async def _poll_memory(self) -> None:
        while True:
            await asyncio.to_thread(self.memory.poll)
            await asyncio.sleep(POLL_INTERVAL_S)


def samples_consumed(run: Run) -> CheckResult:
    steps, config = run.summary["steps_this_run"], run.config
    consumed = int(sum(step["rollout/samples"] for step in run.watcher.steps))
    expected = steps * config.groups_per_step * config.group_size
    issued = run.summary["ledger"]["issued"] * config.group_size
    observed = (
        f"{issued} issued, {run.watcher.tokens} tokens generated, "
        f"{consumed} samples consumed in {steps} steps"
    )
    return CheckResult(
        "samples generated and consumed",
        0 < consumed == expected <= issued and run.watcher.tokens > 0,
        observed,
    )


def versions_advanced(run: Run, engines: int) -> CheckResult:
    versions = [engine.version for engine in run.watcher.engines]
    latency = run.summary["sync_latency_s"] * 1000
    observed = (
        f"{len(versions)} engine{'s' if len(versions) > 1 else ''} at {versions} "
        f"after step {run.config.steps}, {latency:.1f} ms per weight sync"
    )
    return CheckResult(
        "versions advanced on every engine", versions == [run.config.steps] * engines, observed
    )


def workers_on_gpus(run: Run, workers: int) -> CheckResult:
    """Check the GPU memory in use: even with a tiny model, each process holds a CUDA context."""
    grown = run.memory.gpu_growth()
    observed = f"{workers} workers use {grown / MB:,.0f} MB of GPU memory"
    return CheckResult("trainer and engines use GPUs", grown > workers * CONTEXT_MB * MB, observed)


def pause_and_resume(pause: Pause) -> Iterator[CheckResult]:
    observed = f"pause_rollout {pause.paused}, resume_rollout {pause.resumed}"
    yield CheckResult("pause and resume return true", pause.paused and pause.resumed, observed)
    observed = (
        f"{pause.tokens} tokens in {pause.watched_s:.1f} s of pause, "
        f"new tokens {pause.resume_s:.1f} s after resume"
    )
    yield CheckResult(
        "pause and resume take effect", pause.effective and pause.tokens == 0, observed
    )


def checkpoint_resumed(run: Run) -> CheckResult:
    steps = [row["step"] for row in read_metrics(run.config.run_dir)]
    ok = run.watcher.first_step == FIRST_STEPS and steps == list(range(1, ALL_STEPS + 1))
    observed = (
        f"continued after step {run.watcher.first_step}, "
        f"metrics have steps {steps[0]} to {steps[-1]}"
    )
    return CheckResult("checkpoint resumed", ok, observed)


def ledger_balances(run: Run) -> CheckResult:
    lines = (Path(run.config.run_dir) / "ledger.jsonl").read_text().splitlines()
    return ledger(
        map(json.loads, lines), run.summary["ledger"], run.config.steps * run.config.groups_per_step
    )


def stale_sample_rejected() -> CheckResult:
    """Check on a real queue that a trainer at version 5 gets no sample older than 3 versions."""
    client = MessageQueueClient(MessageQueue(max_queue_size=100), max_staleness=3)
    client.put_samples("generated at version 1", param_version=1)
    stale = client.get_samples(current_param_version=5)
    client.put_samples("generated at version 2", param_version=2)
    fresh = client.get_samples(current_param_version=5)
    observed = (
        f"threshold 3, trainer at version 5: version 1 {'returned' if stale else 'rejected'}, "
        f"version 2 {'returned' if fresh else 'rejected'}"
    )
    ok = stale is None and fresh == ["generated at version 2"]
    return CheckResult("stale sample rejected", ok, observed)


def no_process_left() -> CheckResult:
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    _, left = psutil.wait_procs(children, timeout=10)
    return CheckResult("no process left running", not left, f"{len(left)} left")


async def run_checks(choice: Choice, run_dir: Path) -> list[CheckResult]:
    """Run all checks and print each result as soon as it is known."""
    results: list[CheckResult] = []

    def show(result: CheckResult) -> None:
        results.append(result)
        console.print(str(result), style=None if result.ok else "bold red", markup=False)

    settings = [*choice.settings(BATCH, MIN_ENGINES), f"run_dir={run_dir}"]
    engines = choice.engines(MIN_ENGINES)
    show(stale_sample_rejected())
    first = await Run(load_config(RECIPE, settings)).go()
    show(samples_consumed(first))
    show(versions_advanced(first, engines))
    if choice.gpus:
        show(workers_on_gpus(first, choice.train_ranks + engines))
    second = await Run(load_config(RECIPE, [*settings, f"total_training_steps={ALL_STEPS}"])).go(
        pause=True
    )
    show(checkpoint_resumed(second))
    assert second.pause
    for result in pause_and_resume(second.pause):
        show(result)
    show(samples_consumed(second))
    show(versions_advanced(second, engines))
    show(ledger_balances(second))
    show(no_process_left())
    return results


def main() -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("paceline").setLevel(logging.ERROR)
    begun = time.monotonic()
    run_dir = Path("runs") / time.strftime("e2e-%Y%m%d-%H%M%S")
    try:
        choice = choice_from_environment()
        console.print(f"end to end: {choice}; run directory {run_dir}")
        results = asyncio.run(asyncio.wait_for(run_checks(choice, run_dir), LIMIT_S))
    except (ConfigError, ModelError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 2
    except PacelineError as error:
        return _fail(f"the run ended with {type(error).__name__}: {error}")
    except TimeoutError:
        return _fail(f"did not end within {LIMIT_S:g} s; the logs are in {run_dir}/logs")
    failed = sum(not result.ok for result in results)
    if not failed:
        shutil.rmtree(run_dir)
    outcome = (
        f"{failed} of {len(results)} checks failed; the run is in {run_dir}"
        if failed
        else f"all {len(results)} checks passed"
    )
    console.print(
        f"{outcome}; {time.monotonic() - begun:.0f} s", style="bold red" if failed else "bold green"
    )
    return 1 if failed else 0


def _fail(text: str) -> int:
    console.print(f"FAIL  {text}", style="bold red", markup=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
