"""Custom advantage: reward minus the median of its group, so one outlier does not move the rest.

paceline train recipes/hybrid.toml algorithm.advantage=examples/custom_advantage.py:minus_median
"""

import numpy as np
from numpy.typing import NDArray


def minus_median(rewards: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one advantage per completion. `groups` numbers the prompts from 0."""
    medians = [np.median(rewards[groups == group]) for group in range(groups.max() + 1)]
    return rewards - np.array(medians)[groups]
