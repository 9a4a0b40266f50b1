"""What the benchmark runs: each case is the same work under other settings, one of them changed at a time.

The reference is fully async with a staleness bound of 3 and weights swapped in between two decode steps. Lengths of answers are drawn from
a long-tailed distribution, fixed per (prompt, attempt), so that all cases generate and train the same.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.suite.choice import Choice

REFERENCE = "staleness 3"  # also the reference of every other sweep
SYNC = "hybrid sync"  # names of what async is measured against begin with it; the faster counts
VLLM_PYTHON = (
    Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
)  # where vLLM has an environment of its own
GROUP_SIZE = 8
RECIPE_BATCH = {"e2e_minimal": 4, "benchmark_base": 16}  # what one training device takes
SEPARATE = (
    "placement.actor=train",
    "placement.rollout=rollout",
    "schedule.on_sync=swap",
    "schedule.max_staleness=3",
)

SWEEPS = {
    "mode": "Modes: where the roles live and what a hand-over does",
    "staleness": "Staleness threshold (`schedule.max_staleness`)",
    "queue": "Queue size (`queue.max_queue_size`)",
    "interval": "Generation interval (`schedule.sync_every`)",
    "split": "Split of the devices between rollout and training",
    "pause": "Pause and resume in mid-run",
    "backend": "Back ends: trainer, engine, cluster",
    "guide": "The guide's configurations, as they are",
}


@dataclass(frozen=True, slots=True)
class Work:
    """How much a case does."""

    batch: int  # prompts a step, each tried GROUP_SIZE times
    median: int  # tokens of an answer; p99 is eight times as many
    cap: int
    steps: int
    warm_up: int  # steps that are not measured
    rounds: int
    limit_s: float  # of one case
    budget_s: float  # of all: none starts later, so that together they never take longer than budget_s + limit_s


QUICK = Work(
    batch=8, median=24, cap=192, steps=10, warm_up=3, rounds=1, limit_s=60.0, budget_s=235.0
)
FULL = Work(
    batch=16, median=40, cap=512, steps=24, warm_up=5, rounds=2, limit_s=240.0, budget_s=3300.0
)


@dataclass(frozen=True, slots=True)
class Case:
    sweep: str
    name: str
    settings: tuple[str, ...]
    comparable: bool = True  # does the same work as the reference
    quick: bool = False  # part of --quick
    pause: bool = False
    recipe: str | None = None  # run as it is, instead of the benchmark's own work
    skip: str = ""  # why it cannot run here
    python: str = sys.executable  # what runs it

    @property
    def file_name(self) -> str:
        return self.name.replace(",", "").replace(" ", "_")


def all_cases(choice: Choice, work: Work) -> Iterator[Case]:
    """In the order they run in: those that others are compared with first."""
    batch = work.batch * (choice.train_ranks if choice.gpus else 1)
    turns = ("placement.rollout_workers=1", "schedule.max_staleness=0")
    yield Case("mode", SYNC, turns, quick=bool(choice.gpus))
    if (
        not choice.gpus
    ):  # a long tail leaves few sequences to decode, which more threads do not speed up
        yield Case("mode", f"{SYNC}, one thread", (*turns, "placement.threads=1"), quick=True)
    yield from _staleness()
    yield from _modes()
    yield from _queue(batch, (3 + 1) * batch)
    yield from (
        Case(
            "interval",
            f"sync every {steps}",
            (*SEPARATE, f"schedule.sync_every={steps}"),
            quick=steps == 2,
        )
        for steps in (2, 4)
    )
    yield from _splits(choice)
    yield Case("pause", "pause, swap", SEPARATE, comparable=False, pause=True, quick=True)
    yield Case(
        "pause",
        "pause, interrupt",
        (*SEPARATE, "schedule.on_sync=interrupt"),
        comparable=False,
        pause=True,
    )
    yield from _backends(choice)
    yield Case(
        "guide",
        "guide minimal",
        ("total_training_steps=2",),
        comparable=False,
        recipe="e2e_minimal",
    )
    yield Case(
        "guide", "guide performance", (), comparable=False, recipe="benchmark_base", quick=True
    )


def case_settings(case: Case, choice: Choice, work: Work, model: str) -> list[str]:
    """All settings of a case. `model` is what the benchmark's own work is done with."""
    if case.recipe:
        return [*choice.settings(RECIPE_BATCH[case.recipe]), *case.settings]
    return [
        *choice.settings(work.batch),
        f"model={model}",
        f"steps={work.steps}",
        f"group_size={GROUP_SIZE}",
        "data.task=sort:5",
        f"data.max_prompt_length={512 if choice.model else 16}",
        f"rollout.max_response_length={work.cap}",
        "rollout.slots=128",
        "save_every=0",
        "stall_timeout_s=45",
        *case.settings,
    ]


def _staleness() -> Iterator[Case]:
    for bound in (0, 1, 2, 3, 5, 8):
        yield Case(
            "staleness",
            f"staleness {bound}",
            (*SEPARATE, f"schedule.max_staleness={bound}"),
            quick=bound in (0, 1, 3),
        )


def _modes() -> Iterator[Case]:
    yield Case(
        "mode",
        "one step off",
        (*SEPARATE, "schedule.max_staleness=1", "schedule.on_sync=drain"),
        quick=True,
    )
    yield Case(
        "mode", "fully async, interrupt", (*SEPARATE, "schedule.on_sync=interrupt"), quick=True
    )
    pools = (
        "placement.actor=actor_rollout_ref_pool",
        "placement.rollout=actor_rollout_ref_pool",
        "placement.critic=critic_pool",
    )
    settings = (
        *pools,
        "placement.rollout_workers=1",
        "algorithm.name=ppo",
        "schedule.max_staleness=0",
    )
    yield Case("mode", "split placement, PPO", settings, comparable=False)


def _queue(batch: int, capacity: int) -> Iterator[Case]:
    for size in (batch, capacity // 2, 1000):
        yield Case(
            "queue",
            f"queue {size}",
            (*SEPARATE, f"queue.max_queue_size={size}"),
            quick=size == capacity // 2,
        )


def _splits(choice: Choice) -> Iterator[Case]:
    if choice.gpus > 1:
        for engines in range(1, choice.gpus):
            ranks = choice.gpus - engines if choice.backend != "single" else 1
            settings = (f"placement.rollout_workers={engines}", f"placement.train_ranks={ranks}")
            yield Case(
                "split",
                f"{engines} for rollout, {ranks} for training",
                (*SEPARATE, *settings),
                quick=engines == 1,
            )
        return
    for engines in (2, 3):
        yield Case(
            "split",
            f"{engines} engines",
            (*SEPARATE, f"placement.rollout_workers={engines}"),
            quick=engines == 2,
        )
    if choice.backend == "single" and choice.engine == "native":
        shared = (
            "placement.overlap=true",
            "schedule.on_sync=swap",
            "schedule.max_staleness=3",
            "placement.rollout_workers=1",
        )
        yield Case(
            "split", "one pool, both at once", shared, quick=bool(choice.gpus)
        )  # what one GPU is best at


def _backends(choice: Choice) -> Iterator[Case]:
    ranks = max(1, choice.gpus - 1) if choice.gpus else 2
    shards = (f"placement.train_ranks={ranks}", "placement.rollout_workers=1")
    if choice.backend != "single":
        yield Case(
            "backend",
            "single device",
            (*SEPARATE, "train.backend=single", "placement.train_ranks=1"),
        )
    yield Case("backend", "fsdp2", (*SEPARATE, "train.backend=fsdp", *shards), quick=True)
    needs = "" if choice.gpus and find_spec("megatron") else "needs GPUs and megatron-core"
    yield Case("backend", "megatron", (*SEPARATE, "train.backend=megatron", *shards), skip=needs)
    python = sys.executable if find_spec("vllm") else str(VLLM_PYTHON)
    needs = "" if Path(python).exists() else "vLLM is not installed: benchmarks/install_vllm.sh"
    yield Case(
        "backend",
        "vllm engine",
        (*SEPARATE, "rollout.engine=vllm", "placement.rollout_workers=1"),
        skip=needs,
        python=python,
    )
    needs = "" if find_spec("ray") else "Ray is not installed: make .venv/.ray"
    yield Case("backend", "ray cluster", (*SEPARATE, "cluster=ray"), skip=needs)
