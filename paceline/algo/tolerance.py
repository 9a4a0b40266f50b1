"""Equality of rewards up to rounding. Imports no torch, so that the command line starts fast."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-6  # rewards closer than this differ by rounding only (0.1 + 0.2 and 0.3)


def uniform(rewards: Sequence[float] | NDArray[np.floating]) -> bool:
    """Return whether all rewards of a group are equal up to rounding."""
    return float(np.ptp(rewards)) <= TOLERANCE * max(1.0, float(np.abs(rewards).max()))
