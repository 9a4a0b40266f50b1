"""The protocol of a train engine: what holds a model, its gradient and its optimizer. `single.py` is one device.

It knows nothing of algorithms: a loss comes in as a function of the trained tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from paceline.algo.loss import LossFn
from paceline.types import Batch, FloatArray


class TrainEngine(Protocol):
    def logprobs(self, batch: Batch) -> FloatArray:
        """[T] log-prob of each trained token at the sampling temperature; 0 where not mask. Needs the policy head."""
        ...

    def values(self, batch: Batch) -> FloatArray:
        """[T] value of the state each trained token was sampled in; 0 where not mask. Needs the value head."""
        ...

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        """Add the gradient of the loss over the whole batch; returns the loss and its diagnostics."""
        ...

    def optimizer_step(self, lr: float) -> float:
        """Clip, step, clear the gradient; the gradient's norm before clipping. If it is not finite nothing changes
        except that the gradient is cleared, and nan is returned."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, tied ones under each of their names. Live tensors, not copies."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state (safetensors and JSON). Making the folder appear atomically is the caller's part."""
        ...

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote, in place. Raises CheckpointError."""
        ...
