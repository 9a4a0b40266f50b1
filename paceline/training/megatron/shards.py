"""Splits Hugging Face tensors over Megatron's ranks and pipeline stages and gathers them again.

It handles parameters and all tensors of the same shape, such as optimizer state. All ranks must
make the same calls in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import PretrainedConfig

from paceline.errors import ModelError
from paceline.model.tensor_file import Layout, TensorFiles
from paceline.training.megatron.weights import ParameterMapping, Shape, parameter_mappings
from paceline.training.packed import Head

Read = Callable[[nn.Parameter], Tensor]


@dataclass(frozen=True, slots=True)
class RankSlices:
    """The place of a rank, and the range that it has of each flat shard. None: all of them."""

    stage: int
    rank: int  # tensor-parallel
    ranges: Mapping[str, tuple[int, int]] | None = None


Slices = Sequence[RankSlices]  # of all ranks


class SplitParameter:
    """A Megatron parameter, or a tensor of its shape, that is written as Hugging Face tensors."""

    def __init__(
        self,
        mapping: ParameterMapping,
        ranks: int,
        slices: Slices,
        own: nn.Parameter | None,
        part: Callable[[nn.Parameter], Tensor],
        prefix: str,
    ) -> None:
        self.layout: Layout = [
            (prefix + name, shape, torch.float32) for name, shape in mapping.parts.items()
        ]
        self._mapping, self._own, self._part = mapping, own, part
        self._shard = mapping.shard_shape(ranks)
        size = torch.Size(self._shard).numel()
        # Ranks that have the same range of the same shard, in the order of shards and ranges.
        self._holders: dict[tuple[int, int, int], list[int]] = {}
        for number, at in enumerate(slices):
            start, stop = (0, size) if at.ranges is None else at.ranges.get(mapping.name, (0, 0))
            has_shard = at.stage == mapping.stage and (at.rank == 0 or mapping.kind != "replicated")
            if has_shard and start < stop:
                self._holders.setdefault((at.rank, start, stop), []).append(number)
        self._holders = dict(sorted(self._holders.items()))

    def holders(self, writer: int) -> list[int]:
        return [
            writer if writer in ranks else ranks[writer % len(ranks)]
            for ranks in self._holders.values()
        ]

    def buffers(self, device: torch.device) -> list[Tensor]:
        return [torch.empty(stop - start, device=device) for _, start, stop in self._holders]

    def part(self) -> Tensor:
        assert self._own is not None, "a rank of another stage holds nothing"
        return self._part(self._own).reshape(-1)

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        shards: dict[int, list[Tensor]] = {}
        for (shard, *_), part in zip(self._holders, parts, strict=True):
            shards.setdefault(shard, []).append(part)
        full = [part[0] if len(part) == 1 else torch.cat(part) for part in shards.values()]
        return self._mapping.join([shard.view(self._shard) for shard in full])


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
        """Copy this rank's shard of Hugging Face tensors into `target`; read no more of files."""
        parts = [
            tensors.read(prefix + name, region)
            if isinstance(tensors, TensorFiles)
            else tensors[prefix + name][region]
            for name, region in mapping.regions(self._rank, self._ranks).items()
        ]
        target.copy_(mapping.fuse(parts, self._ranks))

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

    def splits(
        self, slices: Slices, part: Callable[[nn.Parameter], Tensor], prefix: str = ""
    ) -> list["SplitParameter"]:
        """Return tensors shaped like the parameters, to be gathered to the ranks that write them.

        `slices`: which range of its shards each rank has; `part` returns this rank's range.
        """
        found = []
        for mapping in self._mappings:
            if not mapping.copy:
                own = self.parameters[mapping.name] if self._is_local(mapping) else None
                found.append(SplitParameter(mapping, self._ranks, slices, own, part, prefix))
        return found

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
