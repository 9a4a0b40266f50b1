"""Splits Hugging Face tensors over Megatron's ranks and pipeline stages and gathers them again.

It handles parameters and all tensors of the same shape, such as optimizer state. All ranks must
make the same calls in the same order.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import PretrainedConfig

from paceline.errors import ModelError
from paceline.training.megatron.weights import ParameterMapping, Shape, parameter_mappings
from paceline.training.packed import Head

Read = Callable[[nn.Parameter], Tensor]


class Shards:
    """This rank's parameters and their mapping to Hugging Face tensors."""

    def __init__(self, model: nn.Module, config: PretrainedConfig, head: Head) -> None:
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._rank = parallel_state.get_tensor_model_parallel_rank()
        self._mappings = parameter_mappings(config, self._stages, head)
        self.parameters = dict(model.named_parameters())
        local = {mapping.name: mapping for mapping in self._mappings if self._is_local(mapping)}
        if local.keys() != self.parameters.keys():
            raise ModelError(
                "no mapping for Megatron's parameters "
                f"{sorted(local.keys() ^ self.parameters.keys())}; use the megatron-core version "
                "that paceline[megatron] installs"
            )
        # Megatron counts replicated parameters once in the gradient norm, and every shard.
        for name, mapping in local.items():
            is_split = mapping.kind != "replicated"
            self.parameters[name].tensor_model_parallel = is_split  # type: ignore[attr-defined]

    def _is_local(self, mapping: ParameterMapping) -> bool:
        return mapping.stage == self._stage

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the Hugging Face tensors, in the order of `gather`."""
        return {
            name: shape
            for mapping in self._mappings
            if not mapping.copy
            for name, shape in mapping.parts.items()
        }

    def local(self) -> Iterator[tuple[ParameterMapping, nn.Parameter]]:
        """Yield the parameters of this rank's pipeline stage with their mappings."""
        for mapping in filter(self._is_local, self._mappings):
            yield mapping, self.parameters[mapping.name]

    @torch.no_grad()
    def fill(
        self, target: Tensor, mapping: ParameterMapping, tensors: Mapping[str, Tensor], prefix: str
    ) -> None:
        """Copy this rank's shard of Hugging Face tensors into `target`."""
        parts = [tensors[prefix + name] for name in mapping.parts]
        target.copy_(mapping.split(parts, self._rank, self._ranks))

    def load(self, weights: Mapping[str, Tensor], prefix: str = "") -> None:
        """Load this rank's shard of every weight; a missing value head keeps its initial values."""
        for mapping, parameter in self.local():
            missing = [name for name in mapping.parts if prefix + name not in weights]
            if missing and mapping.name.startswith("value_head"):
                continue
            if missing:
                raise ModelError(
                    f"the model has no weight {prefix + missing[0]!r}: it is incomplete or has "
                    "another architecture; check the model's files"
                )
            self.fill(parameter, mapping, weights, prefix)

    def gather(
        self, read: Read = lambda parameter: parameter.detach()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield `read(parameter)` of each parameter as full Hugging Face tensors, on every rank."""
        for mapping in self._mappings:
            if not mapping.copy:
                yield from zip(mapping.parts, self._full_tensors(mapping, read), strict=True)

    def _full_tensors(self, mapping: ParameterMapping, read: Read) -> list[Tensor]:
        device = next(iter(self.parameters.values())).device
        if self._is_local(mapping):
            shard = read(self.parameters[mapping.name]).contiguous()
            shards = [shard]
            if mapping.kind != "replicated" and self._ranks > 1:
                shards = [torch.empty_like(shard) for _ in range(self._ranks)]
                dist.all_gather(shards, shard, parallel_state.get_tensor_model_parallel_group())
            parts = [part.contiguous() for part in mapping.join(shards)]
        else:
            parts = [torch.empty(shape, device=device) for shape in mapping.parts.values()]
        if self._stages > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            for part in parts:
                dist.broadcast(part, dist.get_global_rank(group, mapping.stage), group)
        return parts
