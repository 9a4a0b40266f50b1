"""State and log of a run under TRL's names, from Paceline's steps."""

import json
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.trl.config import GRPOConfig
from paceline.trl.translate import Plan, interval
from paceline.types import Finish, Group

if TYPE_CHECKING:
    from paceline.job import Step

Entry = dict[str, Any]

# TRL's name of a metric that Paceline has under another name.
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr",
    "reward": "reward/mean",
    "frac_reward_zero_std": "reward/uniform_group_fraction",
    "entropy": "train/entropy",
    "kl": "train/kl_reference",
    "clip_ratio/region_mean": "train/clip_fraction",
    "completions/mean_length": "rollout/length_mean",
    "completions/clipped_ratio": "rollout/truncated_fraction",
    "sampling/sampling_logp_difference/mean": "train/logprob_diff_mean",
    "sampling/sampling_logp_difference/max": "train/logprob_diff_max",
}


class TrainOutput(NamedTuple):
    """The result of `trainer.train()`."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass
class TrainerState:
    """Progress of the run. A step is an optimizer update, as in TRL."""

    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    num_train_epochs: int = 0
    logging_steps: int = 0
    num_input_tokens_seen: int = 0
    log_history: list[Entry] = field(default_factory=list)
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        Path(json_path).write_text(json.dumps(vars(self), indent=2), encoding="utf-8")

    def note_best(self, args: GRPOConfig, metrics: Mapping[str, float]) -> None:
        """Keep the best value of `metric_for_best_model`, which EarlyStoppingCallback reads."""
        if args.metric_for_best_model is None:
            return
        value = metrics.get(f"eval_{args.metric_for_best_model.removeprefix('eval_')}")
        if value is None:
            return
        best, rises = self.best_metric, args.greater_is_better
        if best is None or (value > best if rises else value < best):
            self.best_metric = value


class History:
    """Turns the steps of a run into log entries: means over the updates since the last entry."""

    def __init__(
        self, args: GRPOConfig, plan: Plan, functions: Sequence[str], pending: "Pending"
    ) -> None:
        self._args, self._plan, self._functions = args, plan, functions
        self._pending = pending
        self._sums: dict[str, list[float]] = defaultdict(list)
        self._losses: list[float] = []
        self._started = self._before = time.perf_counter()
        strategy = str(getattr(args.logging_strategy, "value", args.logging_strategy))
        every = interval(args.logging_steps, plan.max_steps)
        self._every = {"no": 0, "epoch": plan.steps_per_epoch * plan.updates}.get(strategy, every)

    def begin(self, state: TrainerState) -> None:
        state.max_steps, state.logging_steps = self._plan.max_steps, self._every
        state.num_train_epochs = math.ceil(self._plan.steps / self._plan.steps_per_epoch)
        state.global_step = state.num_input_tokens_seen = 0
        state.best_metric = None
        state.log_history.clear()
        self._started = self._before = time.perf_counter()

    def add(self, state: TrainerState, step: "Step") -> Entry | None:
        """Count a step; return the entry that it completes, if any."""
        before = (step.step - 1) * self._plan.updates
        state.global_step = before + self._plan.updates
        state.epoch = step.step / self._plan.steps_per_epoch
        state.num_input_tokens_seen += int(step.metrics["rollout/tokens"])
        for name, value in self._values(step).items():
            if math.isfinite(value):
                self._sums[name].append(value)
        self._losses.append(step.metrics.get("train/loss", 0.0))
        due = self._every and state.global_step // self._every > before // self._every
        if not due and not (self._args.logging_first_step and step.step == 1):
            return None
        entry = {name: fmean(values) for name, values in self._sums.items()}
        self._sums.clear()
        return self._log(state, entry)

    def finish(self, state: TrainerState) -> TrainOutput:
        """Log the totals and return them."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        samples = self._plan.groups * self._args.num_generations * len(self._losses)
        known = [loss for loss in self._losses if math.isfinite(loss)]  # not of skipped updates
        loss = fmean(known) if known else 0.0
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": samples / seconds,
            "train_steps_per_second": len(self._losses) * self._plan.updates / seconds,
            "train_loss": loss,
        }
        self._log(state, dict(metrics))
        return TrainOutput(state.global_step, loss, metrics | {"epoch": state.epoch})

    def _log(self, state: TrainerState, entry: Entry) -> Entry:
        entry |= {"epoch": state.epoch, "step": state.global_step}
        state.log_history.append(entry)
        return entry

    def _values(self, step: "Step") -> Mapping[str, float]:
        now = time.perf_counter()
        found = {
            ours: step.metrics[theirs] for ours, theirs in NAMES.items() if theirs in step.metrics
        }
        found |= describe(step.groups, self._functions) | self._pending.take()
        found["step_time"], self._before = now - self._before, now
        return found


class Pending:
    """What reward functions log with `log_metric` and `log_extra`, until the next step.

    They log in threads, at any time, so every value is added and taken in one operation.
    """

    def __init__(self) -> None:
        self._logged: deque[tuple[str, float]] = deque()

    def log_metric(self, name: str, value: float) -> None:
        self._logged.append((name, float(value)))

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Ignore a column of TRL's table of completions, which Paceline does not print."""

    def take(self) -> dict[str, float]:
        found: dict[str, list[float]] = defaultdict(list)
        while self._logged:
            name, value = self._logged.popleft()
            found[name].append(value)
        return {name: fmean(values) for name, values in found.items()}


def describe(groups: Sequence[Group], functions: Iterable[str]) -> dict[str, float]:
    """Return TRL's statistics of completions and of each reward function."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = [trajectory.num_tokens for trajectory in trajectories]
    ended = [
        trajectory.num_tokens
        for trajectory in trajectories
        if trajectory.turns[-1].completion.finish is not Finish.LENGTH
    ] or [0]
    found = {
        "reward_std": _std([trajectory.total_reward for trajectory in trajectories]),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/mean_terminated_length": fmean(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }
    for name in functions:
        values = [t.details[name] for t in trajectories if name in t.details]
        if values:
            found |= {f"rewards/{name}/mean": fmean(values), f"rewards/{name}/std": _std(values)}
    return found


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
