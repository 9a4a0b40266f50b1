"""A model spread over tensor-parallel ranks and pipeline stages: whole tensors in, each rank keeps its part; parts put together again.

Works on parameters and on anything of their shape. All ranks must ask for the same things in the same order.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import PretrainedConfig

from paceline.errors import ModelError
from paceline.train.megatron_weights import ParameterMapping, Shape, slots
from paceline.train.packed import Head

Read = Callable[[nn.Parameter], Tensor]


class Shards:
    """This rank's parameters, and how they make up the Hugging Face model."""

    def __init__(self, model: nn.Module, config: PretrainedConfig, head: Head) -> None:
        self._stages, self._stage = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        self._ranks, self._rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        self._slots = slots(config, self._stages, head)
        self.parameters = dict(model.named_parameters())
        mine = {slot.name: slot for slot in self._slots if slot.stage == self._stage}
        if mine.keys() != self.parameters.keys():
            raise ModelError(
                f"no rule for Megatron's parameters {sorted(mine.keys() ^ self.parameters.keys())}: another megatron-core?"
            )
        for (
            name,
            slot,
        ) in mine.items():  # Megatron counts a replica once in the gradient's norm, and parts each
            self.parameters[name].tensor_model_parallel = slot.kind != "whole"  # type: ignore[attr-defined]

    def shapes(self) -> dict[str, Shape]:
        """Of the whole tensors, in the order `gather` gives them."""
        return {
            name: shape
            for slot in self._slots
            if not slot.copy
            for name, shape in slot.parts.items()
        }

    def own(self) -> Iterator[tuple[ParameterMapping, nn.Parameter]]:
        for slot in self._slots:
            if slot.stage == self._stage:
                yield slot, self.parameters[slot.name]

    @torch.no_grad()
    def fill(self, target: Tensor, slot: ParameterMapping, read: Callable[[str], Tensor]) -> None:
        """This rank's part of whole tensors that are read by name."""
        target.copy_(slot.split([read(name) for name in slot.parts], self._rank, self._ranks))

    def load(self, weights: Mapping[str, Tensor], prefix: str = "") -> None:
        """Take this rank's part of every weight. A value head that is not there stays as it is."""
        for slot, parameter in self.own():
            missing = [name for name in slot.parts if prefix + name not in weights]
            if missing and slot.name.startswith("value_head"):
                continue
            if missing:
                raise ModelError(
                    f"the model has no weight {prefix + missing[0]!r}: is it of another architecture, or incomplete?"
                )
            self.fill(parameter, slot, lambda name: weights[prefix + name])

    def gather(
        self, read: Read = lambda parameter: parameter.detach()
    ) -> Iterator[tuple[str, Tensor]]:
        """What `read` gives of each parameter, as whole Hugging Face tensors on every rank, one by one."""
        for slot in self._slots:
            if not slot.copy:
                yield from zip(slot.parts, self._whole(slot, read), strict=True)

    def _whole(self, slot: ParameterMapping, read: Read) -> list[Tensor]:
        device = next(iter(self.parameters.values())).device
        if slot.stage == self._stage:
            shard = read(self.parameters[slot.name]).contiguous()
            shards = [shard]
            if slot.kind != "whole" and self._ranks > 1:
                shards = [torch.empty_like(shard) for _ in range(self._ranks)]
                dist.all_gather(shards, shard, parallel_state.get_tensor_model_parallel_group())
            parts = [part.contiguous() for part in slot.join(shards)]
        else:
            parts = [torch.empty(shape, device=device) for shape in slot.parts.values()]
        if self._stages > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            for part in parts:
                dist.broadcast(part, dist.get_global_rank(group, slot.stage), group)
        return parts
