"""Protocol of a train engine, which holds a model, its gradients and its optimizer.

Implementations: `single.py` and `lora.py` (one device), `fsdp.py` and `megatron/` (several). An
engine is independent of algorithms: the caller passes the loss as a function of the trained tokens.
All ranks of an engine are called with the same arguments in the same order, process their part of
the batch and return the result of the whole batch.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from paceline.algo.loss import LossFn
from paceline.training.offload import Moved
from paceline.types import Batch, FloatArray


class TrainEngine(Protocol):
    def logprobs(self, batch: Batch) -> FloatArray:
        """Return the log-prob of each trained token at the sampling temperature, as [T].

        Tokens outside the mask have 0. Requires the policy head.
        """
        ...

    def values(self, batch: Batch) -> FloatArray:
        """Return the value of the state in which each trained token was sampled, as [T].

        Tokens outside the mask have 0. Requires the value head.
        """
        ...

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        """Add the gradient of the loss over the whole batch; return the loss and its metrics."""
        ...

    def optimizer_step(self, lr: float, skip: bool = False) -> float:
        """Clip the gradient, step, clear the gradient; return its norm before clipping.

        If the norm is not finite, skip the step, clear the gradient and return nan. `skip`: only
        clear the gradient and return its norm.
        """
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight, unsharded, by Hugging Face name; tied weights appear under each name.

        Tensors are not copied where possible. Weights are gathered one by one, so every rank must
        consume the whole iterator.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state to a checkpoint, as `training_state.py` describes.

        The caller makes the directory appear atomically.
        """
        ...

    def load(self, folder: Path) -> None:
        """Load in place what `save` of any engine and number of ranks wrote.

        Raises CheckpointError.
        """
        ...

    def place(self, where: Literal["device", "host"]) -> Moved:
        """Move parameters, gradients and optimizer state to host memory, or back to the device.

        Call no other method while they are in host memory. An engine on a CPU moves nothing.
        """
        ...
