"""What a rank of the tests' worker groups does: holds Megatron engines by name and calls their methods."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.contract.test_train_engine import tiny


class Engines:
    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}

    def make(self, name: str, model: str, settings: Any, tensor: int, pipeline: int, options: dict[str, Any]) -> None:
        """A fresh engine on a tiny model. A layout other than the last one's drops all engines of that."""
        from megatron.core import parallel_state

        from paceline.train.megatron import Megatron

        if parallel_state.model_parallel_is_initialized():
            found = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size()
            if found != (tensor, pipeline):
                self._engines.clear()
                gc.collect()
                parallel_state.destroy_model_parallel()
        source = tiny(model)
        self._engines[name] = Megatron(source.config, source.state_dict(), settings, tensor=tensor, pipeline=pipeline, **options)

    def call(self, name: str, method: str, *args: Any) -> Any:
        return getattr(self._engines[name], method)(*args)

    def weights(self, name: str) -> dict[str, Any]:
        return {key: tensor.numpy().copy() for key, tensor in self._engines[name].export_weights()}

    def save(self, name: str, folder: str) -> None:
        self._engines[name].save(Path(folder))

    def load(self, name: str, folder: str) -> None:
        self._engines[name].load(Path(folder))

    def swap_qkv(self) -> None:
        """Plant the error of a conversion that lays q, k and v out one after the other."""
        from paceline.train.megatron_weights import Slot

        plain = Slot.split

        def wrong(slot: Slot, full: Any, rank: int, ranks: int) -> Tensor:
            return torch.cat(list(full)).chunk(ranks)[rank] if slot.kind == "qkv" else plain(slot, full, rank, ranks)

        Slot.split = wrong  # type: ignore[method-assign]


def build() -> Mapping[str, Any]:
    torch.set_num_threads(1)
    from tests.megatron.cpu_shim import install

    install()
    return {"engines": Engines()}
