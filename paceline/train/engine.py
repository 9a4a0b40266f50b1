"""The protocol of a train engine: what holds a model, its gradient and its optimizer. `single.py` is one device, `fsdp.py` several.

It knows nothing of algorithms: a loss comes in as a function of the trained tokens. Where an engine has several ranks, each of them
is called with the same arguments in the same order, takes its own share of the batch, and returns the result of the whole.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from paceline.algo.loss import LossFn
from paceline.train.offload import Moved
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
        """Every weight under its Hugging Face name, whole, tied ones under each of their names; live tensors where possible, not
        copies. Gathered one by one, so all ranks must ask for all of them, and all ranks get them."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state as `saved.py` has it. Making the folder appear atomically is the caller's part."""
        ...

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote, of any engine and number of ranks, in place. Raises CheckpointError."""
        ...

    def place(self, where: Literal["device", "host"]) -> Moved:
        """Put parameters, gradients and optimizer state into host memory, or back; meanwhile nothing else may be asked of it. What has
        no other place (a CPU) moves nothing."""
        ...
