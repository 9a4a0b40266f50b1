"""Rows of one trajectory as one: how a conversation that was split into rows counts once.

A row holds what the model saw in one context. Rewards, baselines and lengths are those of the whole
conversation, so these are computed on joined rows. Joining does not move a token: per-token results
apply to the rows as well. In time, the next row follows the last: the environment, which replied
there, also rewrote the context.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.types import Batch

PER_ROW = ("rewards", "groups", "truncated", "baselines")


def joined(batch: Batch) -> Batch:
    """Return the batch with one row per trajectory; the batch itself if it has one already."""
    if batch.trajectories is None:
        return batch
    starts = np.flatnonzero(np.diff(batch.trajectories, prepend=-1))
    lengths = np.add.reduceat(batch.lengths, starts).astype(np.int32)
    return replace(batch, lengths=lengths, trajectories=None, **_rows(batch, starts))


def apart(whole: Batch, batch: Batch) -> Batch:
    """Return a changed joined batch with the rows of the batch that was joined."""
    assert batch.trajectories is not None
    owners = np.cumsum(np.diff(batch.trajectories, prepend=batch.trajectories[0]) != 0)
    lengths, trajectories = batch.lengths, batch.trajectories
    return replace(whole, lengths=lengths, trajectories=trajectories, **_rows(whole, owners))


def rows_of_trajectories(batch: Batch) -> list[NDArray[np.int64]]:
    """Return the rows of each trajectory."""
    rows = np.arange(batch.num_rows)
    if batch.trajectories is None:
        return np.split(rows, batch.num_rows)
    return np.split(rows, np.flatnonzero(np.diff(batch.trajectories)) + 1)


def _rows(batch: Batch, rows: NDArray[np.int64]) -> dict[str, Any]:
    """Return the per-row values of these rows, without lengths."""
    return {name: value[rows] for name in PER_ROW if (value := getattr(batch, name)) is not None}
