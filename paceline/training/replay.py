"""Replay of a train step: its loss and gradient norm, and the rows that are not finite.

No weight changes. The same weights, batch and backend give the same numbers as the step did.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.algo.loss import LossFn, SupervisedLoss
from paceline.model.packing import select_rows
from paceline.training.actor import Actor
from paceline.training.engine import TrainEngine
from paceline.types import Batch, FloatArray

Rows = NDArray[np.int64]


def replay(actor: Actor, batch: Batch, step: int, kl_coef: float | None = None) -> dict[str, Any]:
    """Compute each mini-batch of a step's first epoch, all with the actor's current weights.

    Return the metrics of the mini-batches ("updates") and the rows that are not finite ("rows"),
    each with the reasons.
    """
    engine, given = actor.engine, batch
    logprobs = engine.logprobs(batch)
    loss: LossFn = SupervisedLoss()
    if batch.advantages is not None:
        batch, loss, _ = actor.loss_of(batch, step, kl_coef)
    updates = [_compute(engine, part, loss) for part in actor.first_epoch(batch, step)]
    bad = {row: "its gradient" for row in _bad_rows(engine, batch, loss)}
    inputs = _not_finite_inputs(given, logprobs)
    rows = [
        {"row": row, "group": int(batch.groups[row]), "not finite": inputs.get(row) or [bad[row]]}
        for row in sorted(bad | inputs)
    ]
    return {"updates": updates, "rows": rows}


def _compute(engine: TrainEngine, batch: Batch, loss: LossFn) -> dict[str, float]:
    metrics = engine.forward_backward(batch, loss)
    return metrics | {"grad_norm": engine.optimizer_step(0.0, skip=True)}


def _bad_rows(engine: TrainEngine, batch: Batch, loss: LossFn) -> list[int]:
    """Return the rows that are not finite on their own, found by halving the batch."""
    found, left = [], [np.flatnonzero(_trained_rows(batch))]
    while left:
        rows = left.pop()
        if not len(rows):
            continue
        metrics = _compute(engine, select_rows(batch, rows), loss)
        if all(map(math.isfinite, metrics.values())):
            continue
        if len(rows) == 1:
            found.append(int(rows[0]))
        else:
            left += np.array_split(rows, 2)
    return found


def _trained_rows(batch: Batch) -> NDArray[np.bool_]:
    return _any_token(batch, batch.mask)


def _not_finite_inputs(batch: Batch, logprobs: FloatArray) -> dict[int, list[str]]:
    """Return which inputs of the loss are not finite, by row."""
    inputs = {
        "its log-probs under these weights": logprobs,
        "its sampled log-probs": batch.logprobs,
        "its reference log-probs": batch.ref_logprobs,
        "its values": batch.values,
        "its advantages": batch.advantages,
    }
    found: dict[int, list[str]] = {}
    for name, values in inputs.items():
        if values is not None:
            for row in np.flatnonzero(_any_token(batch, ~np.isfinite(values) & batch.mask)):
                found.setdefault(int(row), []).append(name)
    for row in np.flatnonzero(~np.isfinite(batch.rewards)):
        found.setdefault(int(row), []).append("its reward")
    return found


def _any_token(batch: Batch, where: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows have a token that is marked: [R]."""
    rows = np.repeat(np.arange(batch.num_rows), batch.lengths)
    return np.bincount(rows[where], minlength=batch.num_rows) > 0
