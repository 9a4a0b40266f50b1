"""The actor: turns a batch with advantages into new weights. Knows the algorithm, not the back end."""

import math
from dataclasses import replace

import numpy as np
import torch

from paceline.algo.correction import (
    fresh_tokens,
    importance_weights,
    named_measures,
    off_policy_measures,
)
from paceline.algo.loss import LossFn, PolicyLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import DataError
from paceline.model.packing import select_rows
from paceline.train.engine import TrainEngine
from paceline.train.settings import TrainSettings
from paceline.types import Batch, FloatArray

Metrics = dict[str, float]


class Actor:
    def __init__(
        self,
        engine: TrainEngine,
        algorithm: AlgorithmSettings,
        train: TrainSettings,
        total_steps: int,
        max_length: int | None = None,
    ) -> None:
        self.engine = engine
        self._algorithm, self._train, self._total_steps, self._max_length = (
            algorithm,
            train,
            total_steps,
            max_length,
        )
        self._seen_to_change = False

    def logprobs(self, batch: Batch) -> FloatArray:
        """[T] under the current weights, at the sampling temperature; 0 where not mask."""
        return self.engine.logprobs(batch)

    def update(self, batch: Batch, step: int, kl_coef: float | None = None) -> Metrics:
        """Train on a batch whose advantages are filled in; what happened, as numbers."""
        if batch.advantages is None:
            raise DataError(
                "the batch has no advantages: fill them in with paceline.algo.advantage.advantages first"
            )
        lr = self._train.learning_rate_at(step, self._total_steps)
        if not batch.mask.any():  # every answer was cut off and overlong = "mask"
            return {
                "lr": lr,
                "tokens": 0.0,
                "updates": 0.0,
                "updates_skipped": 0.0,
                "weights_changed": 0.0,
            }
        s = self._algorithm
        measured: Metrics = {}
        corrected = s.proximal == "recomputed" and (
            s.updates_per_step > 1 or s.correction == "m2po"
        )
        if corrected:
            batch, measured = correct(batch, self.logprobs(batch), s, step)
        before = None if self._seen_to_change else self._fingerprint()
        metrics = train_on(
            self.engine,
            batch,
            PolicyLoss(s, step, kl_coef, self._max_length, corrected),
            s,
            lr,
            step,
        )
        if before is not None:
            self._seen_to_change = before != self._fingerprint()
            metrics["weights_changed"] = min(
                metrics["weights_changed"], float(self._seen_to_change)
            )
        return metrics | measured

    def _fingerprint(self) -> list[float]:
        """A number per weight that a changed weight changes. Looked at until the first change is seen: a rate so small that
        rounding swallows it would show in nothing else."""
        found: list[float] = torch.stack(
            [weight.double().square().sum() for _, weight in self.engine.export_weights()]
        ).tolist()
        return found


def correct(
    batch: Batch, proximal: FloatArray, settings: AlgorithmSettings, step: int
) -> tuple[Batch, Metrics]:
    """The batch as if sampled by the trainer's own policy at the start of the step, and what that took.

    The weight of a token goes into its advantage: every objective scales with it exactly.
    """
    assert batch.advantages is not None
    keep = batch.mask
    log_ratio = torch.from_numpy((proximal - batch.logprobs)[keep])
    rows = torch.from_numpy(np.repeat(np.arange(batch.num_rows), batch.lengths)[keep])
    rows = torch.unique(rows, return_inverse=True)[1]  # rows without a trained token do not count
    sums, maxima = off_policy_measures(
        log_ratio, fresh_tokens(torch.from_numpy(batch.versions[keep]), rows, step)
    )
    weights = importance_weights(log_ratio, rows, settings)
    sums |= {"masked_fraction": weights.masked.sum(), "truncated_fraction": weights.truncated.sum()}
    measures = {name: float(value) / len(rows) for name, value in sums.items()} | {
        name: float(value) for name, value in maxima.items()
    }
    advantages = batch.advantages.copy()
    advantages[keep] *= weights.values.numpy()
    shares = {name: measures[name] for name in ("masked_fraction", "truncated_fraction")}
    return replace(batch, logprobs=proximal, advantages=advantages), named_measures(
        measures
    ) | shares


def train_on(
    engine: TrainEngine,
    batch: Batch,
    loss: LossFn,
    algorithm: AlgorithmSettings,
    lr: float,
    step: int,
) -> Metrics:
    """Epochs x mini-batches of optimizer steps. Metrics are means over them; `_max` ones are maxima. What compares the trainer with
    the sampler is of the first pass alone: later ones have moved on purpose."""
    passes: list[Metrics] = []
    norms: list[float] = []
    for epoch in range(algorithm.epochs):
        for part in _mini_batches(batch, algorithm.mini_batches, seed=(step, epoch)):
            passes.append(engine.forward_backward(part, loss))
            norms.append(engine.optimizer_step(lr))
    first_pass = named_measures(passes[0]) if "mismatch_fraction" in passes[0] else {}
    metrics = {}
    for name in passes[0]:
        if not name.startswith(("mismatch_", "staleness_", "logprob_diff_")):
            values = [p[name] for p in passes]
            metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    applied = [norm for norm in norms if math.isfinite(norm)]
    return (
        metrics
        | first_pass
        | {
            "grad_norm": sum(applied) / len(applied) if applied else math.nan,
            "lr": lr,
            "tokens": float(batch.mask.sum()),
            "updates": float(len(norms)),
            "updates_skipped": float(len(norms) - len(applied)),
            "weights_changed": float(lr > 0 and any(norm > 0 for norm in applied)),
        }
    )


def _mini_batches(batch: Batch, count: int, seed: tuple[int, int]) -> list[Batch]:
    """Rows dealt out at random; the same for the same step and epoch. Parts left without a trained token are dropped."""
    if count == 1:
        return [batch]
    order = np.random.default_rng(seed).permutation(batch.num_rows)
    parts = [select_rows(batch, rows) for rows in np.array_split(order, count) if len(rows)]
    return [part for part in parts if part.mask.any()] or [batch]
