"""Train engines in rank processes, with the interface of a local engine.

Every call goes to all ranks; rank 0 returns the result.
"""

import asyncio
import copy
import itertools
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from paceline.algo.loss import LossFn
from paceline.remote.group import WorkerGroup
from paceline.remote.process import process_group
from paceline.training.engine import TrainEngine
from paceline.training.offload import Moved
from paceline.training.settings import TrainSettings
from paceline.types import Batch, FloatArray

Make = Callable[..., TrainEngine]  # (model, settings, temperature=, head=), in each rank
Arrays = dict[str, NDArray[Any]]
KEPT = 3  # number of engines that a test can use at the same time


class EngineService:
    """Engines of the tests inside a rank. Tensors are sent as arrays, models pickled."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._engines: dict[int, TrainEngine] = {}

    def make(
        self,
        key: int,
        model: bytes,
        settings: TrainSettings,
        options: dict[str, Any],
        make: Make | None,
    ) -> None:
        self._engines = {
            other: engine for other, engine in self._engines.items() if other > key - KEPT
        }
        self._engines[key] = (make or self._make)(pickle.loads(model), settings, **options)

    def call_engine(self, key: int, method: str, *args: Any) -> Any:
        return getattr(self._engines[key], method)(*args)

    def weights(self, key: int) -> Arrays:
        return {
            name: tensor.clone().cpu().numpy()
            for name, tensor in self._engines[key].export_weights()
        }

    def gradients(self, key: int) -> Arrays:
        from paceline.training.training_state import full_tensor

        engine: Any = self._engines[key]
        return {
            name: full_tensor(p.grad).cpu().numpy()
            for name, p in engine._parameters.items()
            if p.grad is not None
        }

    def held(self, key: int) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state on this rank."""
        return held_bytes(self._engines[key])


def held_bytes(engine: Any) -> dict[str, int]:
    def local(tensor: Any) -> Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def total(tensors: Any) -> int:
        return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)

    parameters = list(engine._parameters.values())
    state = [
        tensor
        for states in engine._optimizer.state.values()
        for tensor in states.values()
        if tensor.ndim
    ]
    return {
        "parameters": total(parameters),
        "gradients": total(p.grad for p in parameters if p.grad is not None),
        "optimizer": total(state),
    }


def build_service(make: Make) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    return {"engine": EngineService(make)}


class Ranks:
    """A group of ranks with blocking calls."""

    def __init__(self, make: Make, count: int, folder: Path, **settings: Any) -> None:
        """Set `settings` on top of the settings of every engine."""
        self._settings = settings
        self._usual: Make | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._keys = itertools.count(1)

        async def start() -> WorkerGroup:
            group = process_group(
                "test", build_service, (make,), ranks=count, threads=1, log_folder=folder
            )
            await group.ready()
            return group

        self.group = self._wait(start())

    def __call__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        *,
        make: Make | None = None,
        **options: Any,
    ) -> "RemoteEngine":
        """Create an engine, with `make` if given. Only the last few engines are kept."""
        key, settings = next(self._keys), settings.model_copy(update=self._settings)
        self.call("make", key, pickle.dumps(model), settings, options, make or self._usual)
        return RemoteEngine(self, key)

    def using(self, make: Make | None = None, **settings: Any) -> "Ranks":
        """Return the same ranks, which create their engines in another way."""
        other = copy.copy(self)
        other._usual, other._settings = make, self._settings | settings
        return other

    def call(self, method: str, *args: Any) -> Any:
        return self._wait(self.group.call("engine", method, *args))

    def close(self) -> None:
        self._wait(self.group.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(250)


class RemoteEngine:
    """A TrainEngine whose ranks are other processes."""

    def __init__(self, ranks: Ranks, key: int) -> None:
        self._ranks, self._key = ranks, key

    def logprobs(self, batch: Batch) -> FloatArray:
        return self._call("logprobs", batch)

    def values(self, batch: Batch) -> FloatArray:
        return self._call("values", batch)

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        return self._call("forward_backward", batch, loss_fn)

    def optimizer_step(self, lr: float, skip: bool = False) -> float:
        return self._call("optimizer_step", lr, skip)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, array in self._ranks.call("weights", self._key).items():
            yield name, torch.from_numpy(array.copy())

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array.copy())
            for name, array in self._ranks.call("gradients", self._key).items()
        }

    def held(self) -> dict[str, int]:
        return self._ranks.call("held", self._key)

    def save(self, folder: Path) -> None:
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def place(self, where: Literal["device", "host"]) -> Moved:
        return self._call("place", where)

    def _call(self, method: str, *args: Any) -> Any:
        return self._ranks.call("call_engine", self._key, method, *args)
