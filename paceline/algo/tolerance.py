"""Equality of rewards up to rounding. Imports no torch, so that the command line starts fast."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-6  # rewards closer than this differ by rounding only (0.1 + 0.2 and 0.3)


def uniform(rewards: Sequence[float] | NDArray[np.floating]) -> bool:
    """Return whether all rewards of a group are equal up to rounding."""
    return float(np.ptp(rewards)) <= TOLERANCE * max(1.0, float(np.abs(rewards).max()))


def uniform_groups(rewards: NDArray[np.float64], groups: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return for each row whether all rewards of its group are equal up to rounding."""
    names, number = np.unique(groups, return_inverse=True)
    high, low = np.full(len(names), -np.inf), np.full(len(names), np.inf)
    np.maximum.at(high, number, rewards)
    np.minimum.at(low, number, rewards)
    limit = TOLERANCE * np.maximum(1.0, np.maximum(np.abs(high), np.abs(low)))
    equal: NDArray[np.bool_] = (high - low <= limit)[number]
    return equal
