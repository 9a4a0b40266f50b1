"""The actor: turns a batch with advantages into new weights. Knows the algorithm, not the back end."""

import math

import numpy as np

from paceline.algo.loss import LossFn, PolicyLoss, truncate_importance
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import DataError
from paceline.train.engine import TrainEngine
from paceline.train.packing import select_rows
from paceline.train.settings import TrainSettings
from paceline.types import Batch, FloatArray


class Actor:
    def __init__(self, engine: TrainEngine, algorithm: AlgorithmSettings, train: TrainSettings, total_steps: int) -> None:
        self.engine = engine
        self._algorithm, self._train, self._total_steps = algorithm, train, total_steps

    def logprobs(self, batch: Batch) -> FloatArray:
        """[T] under the current weights, at the sampling temperature; 0 where not mask."""
        return self.engine.logprobs(batch)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on a batch whose advantages are filled in; what happened, as numbers."""
        if batch.advantages is None:
            raise DataError("the batch has no advantages: fill them in with paceline.algo.advantage.advantages first")
        gap: dict[str, float] = {}
        if self._algorithm.importance_cap is not None:
            proximal = self.logprobs(batch)
            difference = np.abs(proximal - batch.logprobs)[batch.mask]
            gap = {"logprob_gap_mean": float(difference.mean()), "logprob_gap_max": float(difference.max())}
            batch = truncate_importance(batch, proximal, self._algorithm.importance_cap)
        lr = self._train.learning_rate_at(step, self._total_steps)
        metrics = train_on(self.engine, batch, PolicyLoss(self._algorithm), self._algorithm, lr, step)
        return metrics | gap


def train_on(engine: TrainEngine, batch: Batch, loss: LossFn, algorithm: AlgorithmSettings, lr: float, step: int) -> dict[str, float]:
    """Epochs x mini-batches of optimizer steps. Metrics are means over them; `_max` ones are maxima. The log-prob gap is
    that of the first pass alone: later ones have moved on purpose."""
    passes: list[dict[str, float]] = []
    norms: list[float] = []
    for epoch in range(algorithm.epochs):
        for part in _mini_batches(batch, algorithm.mini_batches, seed=(step, epoch)):
            passes.append(engine.forward_backward(part, loss))
            norms.append(engine.optimizer_step(lr))
    metrics = {}
    for name in passes[0]:
        values = [p[name] for p in passes]
        metrics[name] = values[0] if name.startswith("logprob_gap") else max(values) if name.endswith("_max") else sum(values) / len(values)
    applied = [norm for norm in norms if math.isfinite(norm)]
    return metrics | {
        "grad_norm": sum(applied) / len(applied) if applied else math.nan,
        "lr": lr,
        "tokens": float(batch.mask.sum()),
        "updates": float(len(norms)),
        "updates_skipped": float(len(norms) - len(applied)),
        "weights_changed": float(lr > 0 and any(norm > 0 for norm in applied)),
    }


def _mini_batches(batch: Batch, count: int, seed: tuple[int, int]) -> list[Batch]:
    """Rows dealt out at random; the same for the same step and epoch. Parts left without a trained token are dropped."""
    if count == 1:
        return [batch]
    order = np.random.default_rng(seed).permutation(batch.num_rows)
    parts = [select_rows(batch, rows) for rows in np.array_split(order, count) if len(rows)]
    return [part for part in parts if part.mask.any()] or [batch]
