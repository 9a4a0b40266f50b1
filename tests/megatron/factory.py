"""Factory of Megatron engines on a CPU, for the ranks of a test."""

import gc
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.training.engine import TrainEngine
from paceline.training.settings import TrainSettings
from tests.megatron.cpu_shim import install

installed = False


def make(
    model: PreTrainedModel,
    settings: TrainSettings,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    planted: str | None = None,
    path: str | None = None,
    **options: Any,
) -> TrainEngine:
    """Create an engine in this layout, also if the previous one had another.

    `planted` names an error to build in. With `path`, open these files instead of `model`.
    """
    global installed
    if not installed:
        install()
        installed = True
    from megatron.core import parallel_state

    from paceline.training.megatron.engine import Megatron

    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if found != (tensor, pipeline):
            _destroy_groups()
    weights = model.state_dict()
    settings = settings.model_copy(
        update={"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    )
    if path is not None:
        return Megatron.open(path, settings, options["temperature"], options["head"])
    if planted == "qkv":
        return _with_swapped_qkv(lambda: Megatron(model.config, weights, settings, **options))
    engine = Megatron(model.config, weights, settings, **options)
    if planted == "mask":
        for layer in engine._model.decoder.layers:
            layer.self_attention.core_attention = _SeesOneRow()
    return engine


def _destroy_groups() -> None:
    """End the layout. Engines of it cannot be used any more.

    Megatron only forgets its groups. Each of them has threads, and a rank would collect thousands.
    """
    from megatron.core import parallel_state

    for group in parallel_state._global_process_group_list:
        if group is not None:  # None is the group of all ranks
            torch.distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    gc.collect()  # free the engines of the old layout, which also refer to the groups


class _SeesOneRow(torch.nn.Module):
    """Attention that treats all packed rows as one row."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def _with_swapped_qkv(build: Any) -> TrainEngine:
    """Create an engine with k and v in each other's place."""
    from paceline.training.megatron.weights import ParameterMapping

    right = ParameterMapping.fuse

    def wrong(mapping: ParameterMapping, parts: Any, ranks: int) -> Tensor:
        if mapping.kind == "qkv":
            parts = [parts[0], parts[2], parts[1]]
        return right(mapping, parts, ranks)

    ParameterMapping.fuse = wrong  # type: ignore[method-assign]
    try:
        engine: TrainEngine = build()
        return engine
    finally:
        ParameterMapping.fuse = right  # type: ignore[method-assign]
