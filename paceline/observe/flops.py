"""Model FLOP utilization of training: the floating-point operations of the model's matmuls per
second, as a fraction of what the GPU can do.

A train step counts a forward and a backward pass over all tokens, once per epoch. Recomputed
activations and other models' forward passes do not count. A CPU has no entry in the table.
"""

import re
from collections.abc import Sequence

from paceline.model.shape import ModelShape
from paceline.types import Group

# Dense bfloat16 operations per second, from the data sheets.
PEAKS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(gpu_name: str, dtype: str) -> float | None:
    """Return the operations per second of a GPU, or None if they are not known."""
    if dtype not in ("bfloat16", "float16"):
        return None
    # Whole words: an RTX A1000 is not an A100.
    found = (peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", gpu_name))
    return next(found, None)


def train_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Return the operations of a forward and a backward pass over rows of these lengths."""
    attention = shape.heads * shape.head_dim
    projections = shape.hidden * (2 * attention + 2 * shape.kv_heads * shape.head_dim)
    layer = projections + 3 * shape.hidden * shape.mlp
    weights = shape.layers * layer + shape.hidden * shape.vocabulary
    tokens, pairs = sum(lengths), sum(length * length / 2 for length in lengths)
    # Two operations per weight and token forward, four backward; scores and values for each pair.
    return 6.0 * weights * tokens + 12.0 * shape.layers * attention * pairs


def row_lengths(groups: Sequence[Group]) -> list[int]:
    """Return the tokens of each row, with its prompts."""
    return [
        sum(len(turn.prompt) + len(turn.completion) for turn in row)
        for group in groups
        for trajectory in group.trajectories
        for row in trajectory.rows
    ]


class TrainUtilization:
    """Measures the utilization of the GPUs that train the actor."""

    def __init__(self, shape: ModelShape, peak: float, devices: int, epochs: int) -> None:
        self._shape, self._peak, self._devices, self._epochs = shape, peak, devices, epochs
        self._flops = self._seconds = 0.0

    def step(self, groups: Sequence[Group], busy_s: float) -> dict[str, float]:
        """Return the metric of a train step that took `busy_s` seconds."""
        if busy_s <= 0:
            return {}
        flops = self._epochs * train_flops(self._shape, row_lengths(groups))
        self._flops, self._seconds = self._flops + flops, self._seconds + busy_s
        return {"train/flop_utilization": flops / busy_s / self._devices / self._peak}

    @property
    def mean(self) -> float:
        return self._flops / max(self._seconds, 1e-9) / self._devices / self._peak
