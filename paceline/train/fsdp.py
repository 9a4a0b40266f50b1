"""The train engine of several devices: FSDP2 shards a Hugging Face module over ranks, tensor parallel may split its layers besides.

Each rank holds a slice of every parameter, gradient and optimizer state, and works on its own rows. Gradients are added, never
averaged: the loss weights are those of the whole batch already.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from paceline.algo.loss import LossFn, TokenOutputs
from paceline.errors import ConfigError, ModelError
from paceline.model.loading import ROUNDED, model_shape
from paceline.model.packing import (
    MicroBatch,
    empty_micro_batch,
    micro_batch,
    token_data,
    trained_lengths,
)
from paceline.remote.group import is_first_rank
from paceline.train.decoder import LayerPasses
from paceline.train.fused import can_fuse
from paceline.train.memory import COLUMNS, ROWS
from paceline.train.offload import HostOffload, Moved
from paceline.train.optimizer import adamw, optimizer_state
from paceline.train.packed import Head, LossAccumulator, PackedModel
from paceline.train.row_assignment import passes
from paceline.train.settings import TrainSettings
from paceline.train.sharded_decoder import ShardedDecoder
from paceline.train.training_state import MODEL_FILE, Region, load_training, save_training, whole
from paceline.types import Batch, FloatArray

log = logging.getLogger(__name__)

BY_HEAD = (
    "q_norm.weight",
    "k_norm.weight",
)  # whole on every rank, but each sees only its own heads


class Fsdp:
    """A TrainEngine; every rank of the process group makes one, from the same whole model."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        temperature: float = 1.0,
        head: Head = "policy",
    ) -> None:
        self._settings = settings
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        self._mesh = _mesh(self._device, settings.tensor_parallel)
        self._packed = PackedModel(
            model, settings, temperature, head
        )  # looks at the model while it is whole
        self._packed.fused = self._fused(model, temperature or 1.0) if head == "policy" else None
        _shard(self._packed, self._mesh, settings)
        self._parameters = {
            name: cast(DTensor, p) for name, p in self._packed.trained_parameters().items()
        }
        # The optimizer works on this rank's slices as plain tensors: its fused kernel knows no mixture of meshes.
        self._slices = {name: nn.Parameter(_local(p)) for name, p in self._parameters.items()}
        self._optimizer = adamw(self._slices, settings)
        self._host_offload = HostOffload()
        if self._packed.fused is not None:
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

    # -- forward and backward

    def logprobs(self, batch: Batch) -> FloatArray:
        self._packed.require("policy")
        return self._read(batch, "logprobs")

    def values(self, batch: Batch) -> FloatArray:
        self._packed.require("value")
        return self._read(batch, "values")

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        tally, weights = LossAccumulator(batch), loss_fn.weights(batch)
        for micro, is_last in self._micro_batches(batch):
            self._let_go(is_last)
            outputs = self._packed(micro)
            if len(micro.flat) == 0:
                torch.stack(
                    [tensor.sum() for tensor in outputs.values()]
                ).sum().backward()  # adds 0, and lets the others go on
                continue
            terms = loss_fn(TokenOutputs(**outputs), token_data(batch, micro, weights))
            terms.loss.backward()
            tally.add(terms)
        parts: list[tuple[float, dict[str, float], dict[str, float]]] = [
            (0.0, {}, {})
        ] * self._mesh.size(0)
        dist.all_gather_object(parts, tally.totals(), self._mesh.get_group("data"))
        total = LossAccumulator(batch)
        for part in parts:
            total.merge(*part)
        return total.metrics()

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[MicroBatch, bool]]:
        """This rank's, and whether it is the last one."""
        needed = trained_lengths(batch)
        share = passes(needed, self._settings.micro_batch_tokens, self._mesh.size(0))[
            self._mesh.get_local_rank("data")
        ]
        for left, rows in zip(reversed(range(len(share))), share, strict=True):
            yield (
                micro_batch(batch, rows, needed, self._device)
                if len(rows)
                else empty_micro_batch(self._device),
                left == 0,
            )

    def _let_go(self, of_it: bool) -> None:
        """Of gathered weights and their gradients, after the next backward pass? One rank alone need not before the last."""
        if self._mesh.size(0) == 1:
            root = cast(FSDPModule, self._packed)
            root.set_requires_gradient_sync(of_it)
            root.set_reshard_after_backward(of_it)

    @torch.no_grad()
    def _read(self, batch: Batch, name: Literal["logprobs", "values"]) -> FloatArray:
        result = np.zeros(batch.num_tokens, np.float32)
        for micro, _ in self._micro_batches(batch):
            result[micro.flat] = self._packed(micro)[name].float().cpu().numpy()
        self._reshard()
        dist.all_reduce(torch.from_numpy(result), group=self._mesh.get_group("data"))
        return result

    def _reshard(self) -> None:
        """Without a backward pass, what was gathered would stay and grow stale."""
        for module in self._packed.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # -- update

    def optimizer_step(self, lr: float) -> float:
        gradients = self._gradients()
        norm = self._norm(gradients)
        if math.isfinite(norm):
            if gradients:
                torch._foreach_mul_(
                    list(gradients.values()), min(1.0, self._settings.max_grad_norm / (norm + 1e-6))
                )
            for name, gradient in gradients.items():
                self._slices[name].grad = gradient
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._optimizer.zero_grad()
        else:
            log.warning("gradient norm is %s: step skipped, weights unchanged", norm)
        for parameter in self._parameters.values():
            parameter.grad = None
        return norm if math.isfinite(norm) else math.nan

    def _gradients(self) -> dict[str, Tensor]:
        """This rank's slices. What tensor parallel does not split is brought to the same bits on all ranks that have it."""
        gradients = {
            name: _local(p.grad) for name, p in self._parameters.items() if p.grad is not None
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
            total = (
                squares / torch.tensor(holders, dtype=torch.float64, device=self._device)
            ).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def _is_split(self, name: str) -> bool:
        return self._parameters[name].device_mesh.ndim == 2

    # -- weights out and in

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._packed.model.state_dict().items():
            yield name, whole(tensor)

    def save(self, folder: Path) -> None:
        state = optimizer_state(self._optimizer, self._slices)
        sharded = {
            key: self._sharded(key.partition(":")[2], tensor) if tensor.ndim else tensor
            for key, tensor in state.items()
        }
        save_training(folder, MODEL_FILE, self._parameters, sharded)
        if is_first_rank():
            self._packed.model.config.save_pretrained(folder)

    def _sharded(self, name: str, tensor: Tensor) -> Tensor:
        """A slice of optimizer state seen as what it is a slice of."""
        p = self._parameters[name]
        return DTensor.from_local(
            tensor, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def load(self, folder: Path) -> None:
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        load_training(
            folder,
            MODEL_FILE,
            self._slices,
            self._optimizer,
            shapes,
            lambda name: _region(self._parameters[name]),
        )
        for parameter in self._parameters.values():
            parameter.grad = None

    def place(self, where: Literal["device", "host"]) -> Moved:
        return (
            self._host_offload.restore()
            if where == "device"
            else self._host_offload.offload(self._movable())
        )

    def _movable(self) -> Iterable[Tensor]:
        yield from self._slices.values()
        yield from (p.grad for p in self._parameters.values() if p.grad is not None)
        yield from (tensor for state in self._optimizer.state.values() for tensor in state.values())


@cache  # roles that live together share it
def _mesh(device: torch.device, tensor: int) -> DeviceMesh:
    ranks = dist.get_world_size()
    if ranks % tensor:
        raise ConfigError(
            f"train.tensor_parallel = {tensor} does not divide the {ranks} ranks; set placement.train_ranks to a multiple of it"
        )
    return init_device_mesh(
        device.type, (ranks // tensor, tensor), mesh_dim_names=("data", "tensor")
    )


def _shard(packed: PackedModel, mesh: DeviceMesh, settings: TrainSettings) -> None:
    """Layer by layer, so that only one of them is whole at a time. Embedding, last norm and head stay whole from forward to backward."""
    layers = decoder_layers(packed.model)
    if mesh.size(1) > 1:
        _split_layers(packed.model, layers, mesh["tensor"])
    narrow = torch.bfloat16 if settings.dtype == "bfloat16" else None
    # Inputs are not cast: the sum that runs from layer to layer stays float32, as on a single device.
    policy = MixedPrecisionPolicy(
        narrow, torch.float32 if narrow else None, cast_forward_inputs=False
    )
    for layer in layers:
        fully_shard(
            layer, mesh=mesh["data"], reshard_after_forward=mesh.size(0) > 1, mp_policy=policy
        )
    rest = (
        MixedPrecisionPolicy() if packed.fused is None else policy
    )  # a module casts by itself what it wants narrow
    fully_shard(packed, mesh=mesh["data"], reshard_after_forward=False, mp_policy=rest)
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Every architecture has a name of its own for them."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():  # from the outside in: not the experts of a layer
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(
        f"{type(model).__name__} has no list of {count} decoder layers to shard; use train.backend = 'single'"
    )


def _split_layers(model: PreTrainedModel, layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    heads, ranks = model_shape(model.config).kv_heads, mesh.size()
    if heads % ranks:
        raise ConfigError(
            f"train.tensor_parallel = {ranks} does not divide the model's {heads} key-value heads; use a number that does"
        )
    for layer in layers:
        names = [
            name for name, module in layer.named_modules() if isinstance(module, nn.Linear)
        ]  # all ranks in the same order
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() for name in names if name.endswith(COLUMNS)
        }
        plan |= {name: RowwiseParallel() for name in names if name.endswith(ROWS)}
        if len(plan) != len(names) or len(plan) != len(COLUMNS + ROWS):
            raise ModelError(
                f"{type(model).__name__} has other layers than tensor parallel knows ({', '.join(COLUMNS + ROWS)}); set it to 1"
            )
        parallelize_module(layer, mesh, plan)


def _local(tensor: Tensor) -> Tensor:
    """This rank's slice, on the same memory."""
    assert isinstance(tensor, DTensor), "all parameters are sharded"
    with torch.no_grad():
        return tensor.to_local()


def _region(parameter: DTensor) -> Region:
    """Which part of the whole this rank has. Tensor parallel, the last dimension of the mesh, cuts first; FSDP cuts what that leaves."""
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    region = [slice(0, size) for size in parameter.shape]
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if not placement.is_replicate():
            part = region[placement.dim]  # type: ignore[attr-defined]  # every other placement is a kind of Shard
            size = -(-(part.stop - part.start) // mesh.size(axis))
            start = min(part.stop, part.start + size * coordinate[axis])
            region[placement.dim] = slice(start, min(part.stop, start + size))  # type: ignore[attr-defined]
    return tuple(region)
