"""Evaluation during training: held-out prompts, scored with the weights that the engines have.

An evaluation shares the engines with the groups of training. The loop syncs no weights while it
runs, so that one version generates all completions; the trainer continues with the groups that it
may still train on.

Waits for: the engines and the reward, for as many prompts at a time as fill the engines.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.data.held_out import EvaluationSettings
from paceline.errors import PacelineError, RewardError, RolloutError, first_error
from paceline.line_file import encode_line, intact_rows
from paceline.rollout.quarantine import Quarantined
from paceline.rollout.rollouter import Rollouter
from paceline.types import Finish, Group, Prompt, Trajectory

log = logging.getLogger(__name__)

Scores = dict[str, float]


class Prompts(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, seq: int) -> Prompt: ...


FILE = "evaluations.jsonl"


class HeldOut:
    """The evaluations of a run, one line each in evaluations.jsonl."""

    def __init__(
        self,
        settings: EvaluationSettings,
        prompts: Prompts,
        rollouter: Rollouter,
        run_dir: Path,
        *,
        first_step: int,
        last_step: int,
        slots: int,
        report: Callable[[int, Scores], None],
        max_failed: int = 0,
    ) -> None:
        """`rollouter` samples as in an evaluation. `report(step, scores)` gets each result.

        `max_failed`: prompts that may fail, in all evaluations together.
        """
        self._settings, self._prompts, self._rollouter = settings, prompts, rollouter
        self._path, self._checkpoints = run_dir / FILE, run_dir / "checkpoints"
        self._last_step, self._slots, self._report = last_step, slots, report
        self._failures = Failures(max_failed)
        self._done = self._read(first_step)
        self._running: int | None = None  # step that is being evaluated
        self._unlink_best_after(first_step)
        for line in self._done:
            self._link_best(line["step"])

    @property
    def saves(self) -> bool:
        """Whether an evaluated version needs a checkpoint."""
        return self._settings.keep_best

    @property
    def protected(self) -> set[int]:
        """Steps whose checkpoints must not be deleted: the best one, and one that may become it."""
        if not self.saves:
            return set()
        return {step for step in (self._best_step, self._running) if step is not None}

    @property
    def enough(self) -> bool:
        """Whether the run should end: the target is reached, or nothing has improved for long."""
        target, patience = self._settings.target, self._settings.patience
        if target is not None and self._done and self._done[-1]["reward"] >= target:
            return True
        rewards = [line["reward"] for line in self._done]
        return bool(patience) and len(rewards) - 1 - int(np.argmax(rewards)) >= patience

    def due(self, step: int) -> bool:
        last = self._done[-1]["step"] if self._done else None
        if last is None or step == self._last_step:
            return step != last
        return step // self._settings.every > last // self._settings.every

    async def run(self, step: int) -> None:
        """Generate and score all prompts with the engines' weights, which are those of `step`."""
        begun, self._running = time.perf_counter(), step
        try:
            groups = await self._generate()
        finally:
            self._running = None
        for trajectory in (t for group in groups for t in group.trajectories):
            if (versions := _versions(trajectory)) - {step}:
                raise RolloutError(f"an evaluation of step {step} has tokens of {versions}")
        scores = score(groups, self._settings.solved_at, len(self._prompts))
        scores["seconds"] = time.perf_counter() - begun
        self._done.append({"step": step, "wall_time_s": time.time(), **scores})
        with self._path.open("ab") as file:
            file.write(encode_line(self._done[-1]))
        self._link_best(step)
        self._report(step, scores)

    def summary(self) -> dict[str, Any]:
        """Return the first, the last and the best evaluation."""
        if not self._done:
            return {}
        best = next(line for line in self._done if line["step"] == self._best_step)
        return {"first": self._done[0], "last": self._done[-1], "best": best}

    async def _generate(self) -> list[Group]:
        room = asyncio.Semaphore(max(1, self._slots // self._settings.samples))

        async def one(seq: int) -> Group | None:
            async with room:
                try:
                    return await self._rollouter.run(seq, self._prompts[seq])
                except (RewardError, RolloutError) as error:
                    self._failures.leave_out(seq, error)
                    return None

        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(one(seq)) for seq in range(len(self._prompts))]
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        return [group for task in made if (group := task.result())]

    @property
    def _best_step(self) -> int | None:
        best = max(self._done, key=lambda line: line["reward"], default=None)
        return best["step"] if best else None

    def _link_best(self, step: int) -> None:
        """Let checkpoints/best name the checkpoint of this step if it is the best so far."""
        name = f"step_{step:08d}"
        if self.saves and step == self._best_step and (self._checkpoints / name).exists():
            temporary = self._checkpoints / ".best.tmp"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(name)
            os.replace(temporary, self._checkpoints / "best")

    def _unlink_best_after(self, step: int) -> None:
        """Delete checkpoints/best if it names a later step, which a resumed run makes again."""
        link = self._checkpoints / "best"
        if self.saves and link.is_symlink() and os.readlink(link) > f"step_{step:08d}":
            link.unlink()

    def _read(self, first_step: int) -> list[dict[str, Any]]:
        """Return the evaluations before a resumed run, and delete later ones from the file."""
        rows = [row for row in intact_rows(self._path) if _is_evaluation(row)]
        rows = [row for row in rows if row["step"] <= first_step]
        if self._path.exists():
            temporary = self._path.with_suffix(".tmp")
            temporary.write_bytes(b"".join(map(encode_line, rows)))
            temporary.replace(self._path)
        return rows


def _is_evaluation(row: dict[str, Any]) -> bool:
    """Return whether a line without a checksum has what the choice of the best one needs."""
    return isinstance(row.get("step"), int) and isinstance(row.get("reward"), float | int)


class Failures:
    """Prompts of evaluations that fail: they are left out, as far as the run tolerates failures."""

    def __init__(self, limit: int) -> None:
        self._count, self._limit = 0, limit

    def leave_out(self, seq: int, error: PacelineError) -> None:
        """Continue without a prompt; raise if too many have failed."""
        self._count += not isinstance(error, Quarantined)
        if self._count > self._limit:
            error.add_note(
                f"{self._count} prompt(s) of evaluations failed; rollout.max_failed_groups = "
                f"{self._limit}"
            )
            raise error
        log.warning("prompt %d of an evaluation failed and is left out: %s", seq, error)


def score(groups: Sequence[Group], solved_at: float, asked: int) -> Scores:
    """Return the mean reward over all prompts and other statistics. `asked`: number of prompts, of
    which some may have failed."""
    if not groups:
        raise RolloutError(f"all {asked} prompts of the evaluation failed; expected at least one")
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    # Those of each agent at each prompt.
    rewards = [
        [trajectory.total_reward for trajectory in group.trajectories if trajectory.agent == agent]
        for group in groups
        for agent in dict.fromkeys(trajectory.agent for trajectory in group.trajectories)
    ]
    truncated = [t.turns[-1].completion.finish is Finish.LENGTH for t in trajectories]
    found: Scores = {
        "prompts": len(groups),
        "failed": asked - len(groups),
        "samples": len(trajectories),
        "reward": float(np.mean([np.mean(row) for row in rewards])),
        "reward_max": float(np.mean([max(row) for row in rewards])),  # of each prompt
        "tokens_mean": float(np.mean([trajectory.num_tokens for trajectory in trajectories])),
        "truncated_fraction": float(np.mean(truncated)),
    }
    found |= _solved(rewards, solved_at)
    for name in sorted({name for trajectory in trajectories for name in trajectory.details}):
        values = [t.details[name] for t in trajectories if name in t.details]
        found[f"reward_component/{name}"] = float(np.mean(values))
    return found


def _solved(rewards: Sequence[Sequence[float]], solved_at: float) -> Scores:
    """Return pass@k for k = 1, 2, 4, … and the number of samples, estimated without bias."""
    most = min(len(row) for row in rewards)
    sizes = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    counts = [(len(row), sum(reward >= solved_at for reward in row)) for row in rewards]
    return {
        f"pass@{k}": float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts]))
        for k in sizes
    }


def _versions(trajectory: Trajectory) -> set[int]:
    return {int(v) for turn in trajectory.turns for v in turn.completion.versions}
