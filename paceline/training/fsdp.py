"""Train engine for several devices: FSDP2 shards a Hugging Face module over ranks.

Tensor parallelism can also split each layer. Each rank holds a slice of every parameter, gradient
and optimizer state, and processes its rows of the batch. Gradients are summed, not averaged,
because the loss weights already refer to the whole batch.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from paceline.algo.loss import LossFn, TokenOutputs
from paceline.errors import ModelError
from paceline.model.excerpt import excerpt, whole
from paceline.model.hub_names import HubFormat, TensorFormat, persistent_buffers
from paceline.model.loading import ROUNDED, default_device, load_model, model_body
from paceline.model.packing import (
    MicroBatch,
    empty_micro_batch,
    micro_batch,
    trained_lengths,
)
from paceline.model.stored_weights import StoredWeights, open_stored
from paceline.model.tensor_file import Region, TensorFiles
from paceline.training.decoder import LayerPasses
from paceline.training.fused import can_fuse
from paceline.training.loss_accumulator import LossAccumulator
from paceline.training.offload import HostOffload, Moved
from paceline.training.optimizer import adamw, optimizer_state
from paceline.training.packed import EngineWithHead, Head, PackedModel, token_data
from paceline.training.rank_files import Replicated, Sliced, Split
from paceline.training.row_assignment import assign_passes
from paceline.training.settings import TrainSettings
from paceline.training.sharded_decoder import ShardedDecoder
from paceline.training.sharding import (
    allocate_slices,
    decoder_layers,
    device_mesh,
    local_slice,
    region_at,
    shard,
)
from paceline.training.training_state import (
    full_tensor,
    load_training,
    role_of,
    save_optimizer_by_ranks,
    write_model_by_ranks,
)
from paceline.types import Batch, FloatArray

# Replicated on all tensor-parallel ranks, but each rank's gradient covers only its heads.
BY_HEAD = ("q_norm.weight", "k_norm.weight")


class Fsdp(EngineWithHead):
    """A TrainEngine. Every rank of the process group creates one from the same unsharded model.

    With `weights`, the model has no memory for its parameters, and each rank reads its slices.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        temperature: float = 1.0,
        head: Head = "policy",
        weights: StoredWeights | None = None,
    ) -> None:
        self._settings, self._head = settings, head
        self._device = default_device()
        self._mesh = device_mesh(self._device, settings.tensor_parallel)
        hub = (weights.form if weights else HubFormat(model)) if head == "policy" else None
        # PackedModel checks a model with weights, so it must be created before sharding.
        checked = self._check(model, temperature, weights) if weights else None
        self._packed = PackedModel(model, settings, temperature, head, checked)
        fused = self._fused(model, temperature or 1.0) if head == "policy" else None
        self._packed.fused = fused
        if checked is not None and fused is not None:
            _check_fused(checked, fused, settings)
        shard(self._packed, self._mesh, settings)
        if weights is not None:
            allocate_slices(self._packed, self._device)
        self._parameters = {
            name: cast(DTensor, p) for name, p in self._packed.trained_parameters().items()
        }
        # The optimizer gets this rank's slices as plain tensors, because its fused kernel does not
        # support DTensors of different meshes.
        self._slices = {name: nn.Parameter(local_slice(p)) for name, p in self._parameters.items()}
        buffers = persistent_buffers(model)
        self._local_tensors: dict[str, Tensor] = {**self._slices, **buffers}
        if weights is not None:
            self._fill(weights)
        self._form = hub or TensorFormat({**self._parameters, **buffers})
        self._optimizer = adamw(self._slices, settings)
        self._host_offload = HostOffload()
        if fused is not None and checked is None:
            self._packed.check(lambda micro: self._packed(micro)["logprobs"], ROUNDED)
            self._reshard()

    def _fused(self, model: PreTrainedModel, temperature: float) -> ShardedDecoder | None:
        settings = self._settings
        if settings.tensor_parallel > 1 or not can_fuse(
            model, self._packed.trained_parameters(), self._device, settings
        ):
            return None
        return ShardedDecoder(
            model, LayerPasses(model.config, settings.gradient_checkpointing), temperature
        )

    @classmethod
    def open(
        cls, model_path: str, settings: TrainSettings, temperature: float, head: Head
    ) -> "Fsdp":
        """Shard the model and read this rank's slices; load some formats as a whole, then shard."""
        stored = open_stored(model_path)
        model, weights = stored or (load_model(model_path), None)
        part = model if head == "policy" else model_body(model)
        weights = weights.part(model, part) if weights else None
        return cls(part, settings, temperature, head, weights)

    @torch.no_grad()
    def _fill(self, weights: StoredWeights) -> None:
        for name, tensor in weights.read(self._region):
            if name in self._slices and not tensor.sum(dtype=torch.float32).isfinite():
                raise ModelError(
                    f"{weights.files.path}: {name} has values that are not finite; download the "
                    "model again"
                )
            self._local_tensors[name].copy_(tensor)

    def _check(
        self, model: PreTrainedModel, temperature: float, weights: StoredWeights
    ) -> PackedModel:
        """Check an excerpt of the model, or all of it if the excerpt does not run."""
        part = excerpt(model, decoder_layers, weights, self._device)
        try:
            return PackedModel(part, self._settings, temperature, self._head)
        except (ModelError, LookupError):
            del part
            full = whole(model, weights, self._device)
            return PackedModel(full, self._settings, temperature, self._head)

    # -- forward and backward

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        totals, weights = LossAccumulator(batch), loss_fn.weights(batch)
        for micro, is_last in self._micro_batches(batch):
            self._set_release_after_backward(is_last)
            outputs = self._packed(micro)
            if len(micro.flat) == 0:
                # Adds a gradient of 0; the other ranks wait for this rank's collectives.
                torch.stack([tensor.sum() for tensor in outputs.values()]).sum().backward()
                continue
            terms = loss_fn(TokenOutputs(**outputs), token_data(batch, micro, weights))
            terms.loss.backward()
            totals.add(terms)
        parts: list[Any] = [None] * self._mesh.size(0)
        dist.all_gather_object(parts, totals.totals(), self._mesh.get_group("data"))
        result = LossAccumulator(batch)
        for part in parts:
            result.merge(*part)
        return result.metrics()

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield this rank's micro-batches, each with whether it is the last."""
        lengths = trained_lengths(batch)
        limit, ranks = self._settings.micro_batch_tokens, self._mesh.size(0)
        assigned = assign_passes(lengths, limit, ranks)[self._mesh.get_local_rank("data")]
        for number, rows in enumerate(assigned, 1):
            micro = (
                micro_batch(batch, rows, lengths, self._device)
                if len(rows)
                else empty_micro_batch(self._device)
            )
            yield micro, number == len(assigned)

    def _set_release_after_backward(self, release: bool) -> None:
        """Set whether the next backward pass releases gathered weights and reduces their gradients.

        With only one data-parallel rank, this is necessary only after the last micro-batch.
        """
        if self._mesh.size(0) == 1:
            root = cast(FSDPModule, self._packed)
            root.set_requires_gradient_sync(release)
            root.set_reshard_after_backward(release)

    @torch.no_grad()
    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray:
        result = np.zeros(batch.num_tokens, np.float32)
        for micro, _ in self._micro_batches(batch):
            result[micro.flat] = self._packed(micro)[name].float().cpu().numpy()
        self._reshard()
        dist.all_reduce(torch.from_numpy(result), group=self._mesh.get_group("data"))
        return result

    def _reshard(self) -> None:
        """Release gathered weights: without a backward pass they would stay and become outdated."""
        for module in self._packed.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # -- update

    def optimizer_step(self, lr: float, skip: bool = False) -> float:
        gradients = self._gradients()
        norm = self._norm(gradients)
        if math.isfinite(norm) and not skip:
            if gradients:
                scale = min(1.0, self._settings.max_grad_norm / (norm + 1e-6))
                torch._foreach_mul_(list(gradients.values()), scale)
            for name, gradient in gradients.items():
                self._slices[name].grad = gradient
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._optimizer.zero_grad()
        for parameter in self._parameters.values():
            parameter.grad = None
        return norm if math.isfinite(norm) else math.nan

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's slices.

        Gradients of parameters that tensor parallelism does not split are made identical, bit for
        bit, on all tensor-parallel ranks.
        """
        gradients = {
            name: local_slice(p.grad) for name, p in self._parameters.items() if p.grad is not None
        }
        ranks = self._mesh.size(1)
        for name, gradient in gradients.items():
            if ranks > 1 and not self._is_split(name):
                dist.all_reduce(gradient, group=self._mesh.get_group("tensor"))
                if not name.endswith(BY_HEAD):
                    gradient /= ranks
        return gradients

    def _norm(self, gradients: dict[str, Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            squares = torch.stack(torch._foreach_norm(list(gradients.values()))).double().square()
            holders = [
                1.0 if self._is_split(name) else float(self._mesh.size(1)) for name in gradients
            ]
            total = (squares / squares.new_tensor(holders)).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def _is_split(self, name: str) -> bool:
        return self._parameters[name].device_mesh.ndim == 2

    # -- export, save and load

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._packed.model.state_dict().items():
            yield name, full_tensor(tensor)

    def save(self, folder: Path) -> None:
        weights = [self._split(name, name, tensor) for name, tensor in self._local_tensors.items()]
        state = optimizer_state(self._optimizer, self._slices)
        splits = [self._split(key, key.partition(":")[2], tensor) for key, tensor in state.items()]
        config, to = self._packed.model.config, folder / role_of(self._head)
        write_model_by_ranks(to, self._form, config, weights, self._device)
        save_optimizer_by_ranks(folder, self._head, splits, self._device)

    def _split(self, key: str, name: str, own: Tensor) -> Split:
        """Return this rank's part of a tensor that is sharded like the parameter `name`."""
        if name not in self._parameters or not own.ndim:
            return Replicated(key, own)
        p, mesh = self._parameters[name], self._mesh.mesh
        # A parameter that tensor parallelism does not split has only the first axis of the mesh.
        at = {int(mesh[where]): where[: p.device_mesh.ndim] for where in np.ndindex(*mesh.shape)}
        regions = [region_at(p, at[rank]) for rank in range(mesh.numel())]
        return Sliced(key, tuple(p.shape), own, regions)

    def load(self, folder: Path) -> None:
        load_training(
            folder,
            self._head,
            TensorFiles.of_model(folder / role_of(self._head)),
            self._form,
            self._local_tensors,
            self._slices,
            self._optimizer,
            self._region,
        )
        for parameter in self._parameters.values():
            parameter.grad = None

    def _region(self, name: str) -> Region:
        if name not in self._parameters:
            return ()
        coordinate = self._parameters[name].device_mesh.get_coordinate()
        assert coordinate is not None, "every rank is in the mesh"
        return region_at(self._parameters[name], coordinate)

    def place(self, where: Literal["device", "host"]) -> Moved:
        return self._host_offload.place(where, self._movable())

    def _movable(self) -> Iterable[Tensor]:
        yield from self._slices.values()
        yield from (p.grad for p in self._parameters.values() if p.grad is not None)
        yield from (tensor for state in self._optimizer.state.values() for tensor in state.values())


def _check_fused(checked: PackedModel, fused: ShardedDecoder, settings: TrainSettings) -> None:
    """Check the explicit passes with the excerpt, whose weights get the dtype FSDP casts to."""
    for parameter in checked.model.parameters():
        parameter.data = parameter.data.to(getattr(torch, settings.dtype))
    checked.fused = fused.for_model(checked.model)
    checked.check(lambda micro: checked(micro)["logprobs"], ROUNDED)
