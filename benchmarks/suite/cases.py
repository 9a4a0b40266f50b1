"""The cases of the benchmark: the same work with one setting changed at a time.

The reference case is fully async with a staleness bound of 3; engines swap weights between two
decode steps. Completion lengths come from a long-tailed distribution and are fixed per trajectory,
so all cases generate and train the same tokens.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.suite.choice import Choice

REFERENCE = "staleness 3"  # every other sweep is compared with this case
SYNC = "hybrid sync"  # name prefix of the synchronous cases; async is compared with the faster one
# the interpreter of the separate environment that benchmarks/install_vllm.sh creates
VLLM_PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
GROUP_SIZE = 8
RECIPE_BATCH = {"e2e_minimal": 4, "benchmark_base": 16}  # batch size per training device
SEPARATE = (
    "placement.actor=train",
    "placement.rollout=rollout",
    "schedule.on_sync=swap",
    "schedule.max_staleness=3",
)

SWEEPS = {
    "mode": "Modes: role placement and weight sync policy",
    "staleness": "Staleness threshold (`schedule.max_staleness`)",
    "queue": "Queue size (`queue.max_queue_size`)",
    "interval": "Generation interval (`schedule.sync_every`)",
    "split": "Device split between rollout and training",
    "pause": "Pause and resume during a run",
    "backend": "Backends: trainer, engine, cluster",
    "recipe": "Recipes without changes",
}


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work per case, and time limits."""

    batch: int  # prompts per step, with GROUP_SIZE completions each
    median: int  # tokens of a completion; p99 is eight times the median
    cap: int  # maximum tokens of a completion
    steps: int
    warm_up: int  # steps that are not measured
    rounds: int
    limit_s: float  # per case and round
    budget_s: float  # no case starts later, so all of them end within budget_s + limit_s


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
    recipe: str | None = None  # run this recipe instead of the benchmark's forced lengths
    skip: str = ""  # reason why the case cannot run on this machine
    python: str = sys.executable

    @property
    def file_name(self) -> str:
        return self.name.replace(",", "").replace(" ", "_")


def all_cases(choice: Choice, work: Work) -> Iterator[Case]:
    """Yield the cases in running order, beginning with those that others are compared with."""
    batch = work.batch * (choice.train_ranks if choice.gpus else 1)
    alternating = ("placement.rollout_workers=1", "schedule.max_staleness=0")
    yield Case("mode", SYNC, alternating, quick=bool(choice.gpus))
    if not choice.gpus:
        # in the long tail few sequences are left, and a second thread does not speed them up
        one_thread = (*alternating, "placement.threads=1")
        yield Case("mode", f"{SYNC}, one thread", one_thread, quick=True)
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
        "recipe",
        "e2e minimal",
        ("total_training_steps=2",),
        comparable=False,
        recipe="e2e_minimal",
    )
    yield Case(
        "recipe", "benchmark base", (), comparable=False, recipe="benchmark_base", quick=True
    )


def case_settings(case: Case, choice: Choice, work: Work, model: str) -> list[str]:
    """Return all settings of a case; `model` applies to cases without a recipe."""
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
        # on one GPU this is usually the fastest case
        yield Case("split", "one pool, concurrent", shared, quick=bool(choice.gpus))


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
