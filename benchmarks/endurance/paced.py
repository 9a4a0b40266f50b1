"""Functions that benchmarks give to a run: they do the usual work in a chosen time."""

import itertools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.data.tasks import get_task

if TYPE_CHECKING:
    from torch import Tensor

TASK = "reverse:5"
# Environment variables: seconds of each call, and calls of the loss before that.
REWARD_S, LOSS_S = "PACELINE_BENCH_REWARD_S", "PACELINE_BENCH_LOSS_S"
FAST_LOSSES = "PACELINE_BENCH_FAST_LOSSES"
_losses = itertools.count(1)


def reward(completion: str, row: Mapping[str, Any]) -> float:
    """Return the score of the built-in task, like a verifier that takes some time."""
    time.sleep(float(os.environ.get(REWARD_S, "0")))
    return get_task(TASK).score(completion, row)


def loss(logprobs: "Tensor", proximal: "Tensor", advantages: "Tensor") -> "Tensor":
    """Return the loss of each token without a clip, like a large model that takes some time."""
    if next(_losses) > int(os.environ.get(FAST_LOSSES, "0")):
        time.sleep(float(os.environ.get(LOSS_S, "0")))
    return -advantages * (logprobs - proximal).exp()
