"""Actor role: turns a batch with advantages into new weights.

The actor implements the algorithm's update on any backend.
"""

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
from paceline.algo.joined_rows import rows_of_trajectories
from paceline.algo.loss import LossFn, PolicyLoss, SupervisedLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import DataError
from paceline.model.packing import select_rows
from paceline.training.engine import TrainEngine
from paceline.training.settings import TrainSettings
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
        self._algorithm, self._train = algorithm, train
        self._total_steps, self._max_length = total_steps, max_length
        self._weights_have_changed = False

    def logprobs(self, batch: Batch) -> FloatArray:
        """Return log-probs under the current weights at the sampling temperature: [T].

        They are 0 outside the mask.
        """
        return self.engine.logprobs(batch)

    def update(self, batch: Batch, step: int, kl_coef: float | None = None) -> Metrics:
        """Train on a batch with advantages and return the metrics."""
        if batch.advantages is None:
            raise DataError(
                "the batch has no advantages: "
                "compute them with paceline.algo.advantage.advantages first"
            )
        lr = self._train.learning_rate_at(step, self._total_steps)
        if not batch.mask.any():  # every completion was truncated and overlong = "mask"
            zeros = ("tokens", "updates", "updates_skipped", "weights_changed")
            return {"lr": lr} | dict.fromkeys(zeros, 0.0)
        batch, loss, measured = self.loss_of(batch, step, kl_coef)
        return self._train_on(batch, loss, lr, step, measured)

    def loss_of(
        self, batch: Batch, step: int, kl_coef: float | None = None
    ) -> tuple[Batch, LossFn, Metrics]:
        """Return a batch with advantages, corrected if it is at once, its loss, and metrics."""
        s = self._algorithm
        measured: Metrics = {}
        at_once = s.updates_per_step > 1 or s.corrects_whole_batch
        corrected = s.proximal == "recomputed" and at_once
        if corrected:
            batch, measured = correct(batch, self.logprobs(batch), s, step)
        return batch, PolicyLoss(s, step, kl_coef, self._max_length, corrected), measured

    def fit(self, batch: Batch, step: int) -> Metrics:
        """Train on the completions of a batch as they are, and return the metrics."""
        lr = self._train.learning_rate_at(step, self._total_steps)
        return self._train_on(batch, SupervisedLoss(), lr, step)

    def first_epoch(self, batch: Batch, step: int) -> list[Batch]:
        """Return the mini-batches of the first epoch of a step."""
        return _mini_batches(batch, self._algorithm.mini_batches, seed=(step, 0))

    def _train_on(
        self, batch: Batch, loss: LossFn, lr: float, step: int, measured: Metrics | None = None
    ) -> Metrics:
        before = None if self._weights_have_changed else self._fingerprint()
        target = self._train.staleness_kl_target
        metrics = train_on(self.engine, batch, loss, self._algorithm, lr, step, target, measured)
        if before is not None:
            self._weights_have_changed = before != self._fingerprint()
            changed = float(self._weights_have_changed)
            metrics["weights_changed"] = min(metrics["weights_changed"], changed)
        return metrics

    def _fingerprint(self) -> list[float]:
        """Return a number per tensor that changes when the tensor changes.

        Needed until the first change: no other metric shows that a small learning rate is lost in
        rounding.
        """
        found: list[float] = torch.stack(
            [weight.double().square().sum() for _, weight in self.engine.export_weights()]
        ).tolist()
        return found


def correct(
    batch: Batch, proximal: FloatArray, settings: AlgorithmSettings, step: int
) -> tuple[Batch, Metrics]:
    """Return the batch as if the proximal policy had sampled it, and the off-policy metrics.

    Weights are multiplied into the advantages, because every objective scales with those.
    """
    assert batch.advantages is not None
    keep = batch.mask
    log_ratio = torch.from_numpy((proximal - batch.logprobs)[keep])
    rows = torch.from_numpy(np.repeat(np.arange(batch.num_rows), batch.lengths)[keep])
    rows = torch.unique(rows, return_inverse=True)[1]  # skips rows without a trained token
    fresh = fresh_tokens(torch.from_numpy(batch.versions[keep]), rows, step)
    sums, maxima = off_policy_measures(log_ratio, fresh)
    measures = {name: float(value) / len(rows) for name, value in sums.items()}
    measures |= {name: float(value) for name, value in maxima.items()}
    weights = importance_weights(log_ratio, rows, settings)
    metrics = named_measures(measures) | {
        "masked_fraction": float(weights.masked.sum()) / len(rows),
        "truncated_fraction": float(weights.truncated.sum()) / len(rows),
    }
    advantages = batch.advantages.copy()
    advantages[keep] *= weights.values.numpy()
    return replace(batch, logprobs=proximal, advantages=advantages), metrics


def train_on(
    engine: TrainEngine,
    batch: Batch,
    loss: LossFn,
    algorithm: AlgorithmSettings,
    lr: float,
    step: int,
    kl_target: float = 0.0,
    measured: Metrics | None = None,
) -> Metrics:
    """Make epochs x mini_batches optimizer steps and return the metrics.

    A step is skipped if its gradient, its loss or any metric of its log-probs is not finite.

    Metrics are means over the steps; those named `_max` are maxima. Metrics that compare trainer
    and sampler come from the first step alone, because later steps differ on purpose; `measured`
    has them if they were computed before.
    """
    passes: list[Metrics] = []
    norms: list[float] = []
    for epoch in range(algorithm.epochs):
        for part in _mini_batches(batch, algorithm.mini_batches, seed=(step, epoch)):
            passes.append(engine.forward_backward(part, loss))
            if not norms:
                if "mismatch_fraction" in passes[0]:
                    measured = named_measures(passes[0])
                lr *= rate_factor(measured or {}, kl_target)
            # These are results of the whole batch, so all ranks decide alike.
            results = [*passes[-1].values(), *(measured or {}).values()]
            finite = all(map(math.isfinite, results))
            norm = engine.optimizer_step(lr, skip=not finite)
            norms.append(norm if finite else math.nan)
    metrics = {}
    for name in passes[0]:
        if not name.startswith(("mismatch_", "staleness_", "logprob_diff_")):
            values = [p[name] for p in passes]
            metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    applied = [norm for norm in norms if math.isfinite(norm)]
    return (
        metrics
        | (measured or {})
        | {
            "grad_norm": sum(applied) / len(applied) if applied else math.nan,
            "lr": lr,
            "tokens": float(batch.mask.sum()),
            "updates": float(len(norms)),
            "updates_skipped": float(len(norms) - len(applied)),
            "weights_changed": float(lr > 0 and any(norm > 0 for norm in applied)),
        }
    )


def rate_factor(measured: Metrics, kl_target: float) -> float:
    """Return the factor of the learning rate, below 1 if the policy has moved far from the data.

    Updates from stale data correct errors that later updates have corrected already. If the policy
    moves too far within that delay, it overshoots and the reward oscillates, then falls.
    """
    kl = measured.get("staleness_kl", 0.0) * measured.get("stale_fraction", 0.0)
    return kl_target / kl if kl > kl_target > 0 else 1.0


def _mini_batches(batch: Batch, count: int, seed: tuple[int, int]) -> list[Batch]:
    """Split the trajectories at random; the split depends only on step and epoch.

    Parts without a trained token are dropped.
    """
    if count == 1:
        return [batch]
    rows = rows_of_trajectories(batch)
    order = np.random.default_rng(seed).permutation(len(rows))
    parts = [
        select_rows(batch, np.concatenate([rows[number] for number in part]))
        for part in np.array_split(order, count)
        if len(part)
    ]
    return [part for part in parts if part.mask.any()] or [batch]
