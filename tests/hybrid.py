"""Runs whose ranks train and generate in turns, compared with a run on one device.

A directory of tests subclasses `HybridRanks` and `KilledRanks` with its combinations of backend and
engine. The tests of `HybridRanks` share one run per combination.
"""

import asyncio
import io
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from paceline.config import RunConfig, load_config
from paceline.errors import WorkerDied
from paceline.loop import Metrics
from paceline.observe.display import print_summary
from paceline.run import train
from paceline.types import Completion, Prompt, Trajectory
from tests.megatron.cpu_workers import cpu_workers
from tests.processes import children, worker_pids

RANKS = 2
SMALL = [
    "groups_per_step=8",
    "data.task=copy:3",
    "data.max_prompt_length=32",
    "rollout.max_response_length=8",
    "placement.threads=1",
    "train.learning_rate=1e-4",
]
# ReMax generates a greedy completion of each prompt too, as the baseline.
THREE_STEPS = ["steps=3", "save_every=3", "algorithm.name=remax", "group_size=2"]
# Completions are in flight during every switch between generating and training.
IN_FLIGHT = ["steps=1000", "group_size=4", "schedule.max_staleness=1", "rollout.slots=8"]
IN_FLIGHT += ["save_every=0", "train.offload=true"]
PHASES = ("generate", "train", "sync")


@dataclass
class Run:
    """A run that records what it generates, as its reward, and its metrics, as its observer."""

    folder: Path
    victim: str | None = None  # name of the rank to kill, see step_done
    wait_for_swap: bool = False  # kill only after a completion had tokens of two versions
    steps: list[Metrics] = field(default_factory=list)
    completions: dict[tuple[str, int, int], Completion] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    killed_s: float = 0.0

    def train(self, model: str, *settings: str) -> "Run":
        chosen = load_config(None, [f"model={model}", f"run_dir={self.folder}", *SMALL, *settings])
        with cpu_workers() if chosen.train.backend == "megatron" else nullcontext():
            self.summary = asyncio.run(asyncio.wait_for(self._train(chosen), 240))
        return self

    async def _train(self, config: RunConfig) -> dict[str, Any]:
        return await train(config, lambda _: self, reward=self)

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        """Return rewards that depend on every token. The greedy completion is the last one."""
        made = [trajectory.turns[0].completion for trajectory in trajectories]
        for number, completion in enumerate(made):
            self.completions[prompt.uid, completion.versions[0], number] = completion
        return [int(completion.tokens.sum()) % 11 / 11 for completion in made]

    async def close(self) -> None:
        return

    def step_done(self, step: int, metrics: Metrics, *_: object) -> None:
        self.steps.append(metrics)
        ready = step >= 3 and (not self.wait_for_swap or self.has_swapped())
        if self.victim and ready and not self.killed_s:
            os.kill(worker_pids(self.folder)[self.victim], signal.SIGKILL)
            self.killed_s = time.monotonic()

    def has_swapped(self) -> bool:
        """Return whether new weights arrived in the middle of a completion."""
        return any(len(set(each.versions)) > 1 for each in self.completions.values())

    def engines_polled(self, *_: object) -> None:
        return

    def tokens(self) -> dict[tuple[str, int, int], list[int]]:
        """Return all completions by prompt, version and number in the group."""
        return {name: completion.tokens.tolist() for name, completion in self.completions.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the actor of the last checkpoint."""
        actor = sorted((self.folder / "checkpoints").iterdir())[-1] / "actor"
        return {k: v for file in actor.glob("*.safetensors") for k, v in load_file(file).items()}


def single_run(model: str, folder: Path) -> Run:
    """Train on one device, with the native engine."""
    return Run(folder).train(model, *THREE_STEPS)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def table(combinations: Mapping[str, list[str]], slow: Collection[str] = ()) -> Any:
    """Return the fixture `combination` of a class: names and settings, some marked as slow."""

    @pytest.fixture(
        scope="class",
        params=[
            pytest.param(settings, id=name, marks=[pytest.mark.slow] if name in slow else [])
            for name, settings in combinations.items()
        ],
    )
    @classmethod
    def combination(cls: type[object], request: pytest.FixtureRequest) -> list[str]:
        return [f"placement.train_ranks={RANKS}", *request.param]

    return combination


class HybridRanks:
    """A run to its end. A module provides the fixtures `model` and `single`."""

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(
        cls, model: str, combination: list[str], tmp_path_factory: pytest.TempPathFactory
    ) -> Run:
        run = Run(tmp_path_factory.mktemp("ranks")).train(model, *THREE_STEPS, *combination)
        assert not children()
        return run

    def test_all_engines_generate_in_every_step(self, combination: list[str], ranks: Run) -> None:
        engines = RANKS // load_config(None, combination).rollout.ranks
        assert [step["fleet/engines"] for step in ranks.steps] == [engines] * 3
        assert min(step["fleet/completions_min"] for step in ranks.steps) >= 1

    def test_sampled_and_greedy_tokens_equal_those_of_single_device(
        self, single: Run, ranks: Run
    ) -> None:
        assert len(single.completions) == 3 * 8 * 3
        assert ranks.tokens() == single.tokens()

    def test_logprobs_equal_those_of_single_device_and_of_trainer(
        self, single: Run, ranks: Run
    ) -> None:
        for name, expected in single.completions.items():
            found = ranks.completions[name].logprobs
            np.testing.assert_allclose(found, expected.logprobs, rtol=0, atol=1e-4)
        assert max(step["train/logprob_diff_max"] for step in ranks.steps) < 1e-4

    def test_weights_after_three_steps_equal_those_of_single_device(
        self, model: str, single: Run, ranks: Run
    ) -> None:
        start = load_file(Path(model) / "model.safetensors")
        assert largest_difference(start, single.weights()) > 1e-4, "nothing was trained"
        assert largest_difference(single.weights(), ranks.weights()) < 1e-5

    def test_summary_prints_memory_of_each_rank_and_phase(self, ranks: Run) -> None:
        phases = ranks.summary["memory_phases"]
        output = io.StringIO()
        print_summary(Console(file=output, width=120), ranks.summary, "runs/ranks")
        for rank in range(RANKS):
            assert all(phases[f"rank_{rank}_{phase}"] > 1 << 20 for phase in PHASES)
            assert f"memory of rank {rank}, GiB" in output.getvalue()


class KilledRanks:
    """A run that ends because a rank is killed. A module provides the fixture `model`."""

    @pytest.mark.parametrize(("rank", "on_sync"), [(0, "swap"), (1, "drain")])
    def test_completions_survive_switches_and_run_names_killed_rank(
        self, model: str, combination: list[str], rank: int, on_sync: str, tmp_path: Path
    ) -> None:
        run = Run(tmp_path, f"main.{rank}", wait_for_swap=on_sync == "swap")
        with pytest.raises(WorkerDied, match=rf"'main rank {rank}' died .killed by signal 9"):
            run.train(model, *IN_FLIGHT, f"schedule.on_sync={on_sync}", *combination)
        assert time.monotonic() - run.killed_s < 60
        assert not children()
        assert max(step["staleness/max"] for step in run.steps) == 1
        assert on_sync == "drain" or run.has_swapped(), "no completion was in flight"
        fresh = [step.get("train/logprob_diff_max", 0.0) for step in run.steps]
        assert max(fresh) < 1e-4, "an engine did not have the trainer's weights"
