"""Division of a Hugging Face module over ranks: FSDP by layer, tensor parallelism inside layers."""

from collections.abc import Sequence
from functools import cache

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

from paceline.errors import ConfigError, ModelError
from paceline.model.shape import model_shape
from paceline.model.tensor_file import Region
from paceline.training.memory import COLUMNS, ROWS
from paceline.training.packed import PackedModel
from paceline.training.settings import TrainSettings


@cache  # roles in the same process share the mesh
def device_mesh(device: torch.device, tensor: int) -> DeviceMesh:
    ranks = dist.get_world_size()
    if ranks % tensor:
        raise ConfigError(
            f"train.tensor_parallel = {tensor} does not divide the {ranks} ranks; set "
            "placement.train_ranks to a multiple of it"
        )
    return init_device_mesh(
        device.type, (ranks // tensor, tensor), mesh_dim_names=("data", "tensor")
    )


def shard(packed: PackedModel, mesh: DeviceMesh, settings: TrainSettings) -> None:
    """Shard the model by layer, so that only one layer is gathered at a time.

    The embedding, the final norm and the head stay gathered from forward to backward.
    """
    layers = decoder_layers(packed.model)
    if mesh.size(1) > 1:
        _split_layers(packed.model, layers, mesh["tensor"])
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else None
    # Inputs are not cast: the residual stream stays float32, as on a single device.
    policy = MixedPrecisionPolicy(
        dtype, torch.float32 if dtype else None, cast_forward_inputs=False
    )
    for layer in layers:
        fully_shard(
            layer, mesh=mesh["data"], reshard_after_forward=mesh.size(0) > 1, mp_policy=policy
        )
    # Without fused passes, the module casts the remaining weights where it needs bfloat16.
    rest = MixedPrecisionPolicy() if packed.fused is None else policy
    fully_shard(packed, mesh=mesh["data"], reshard_after_forward=False, mp_policy=rest)
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def allocate_slices(packed: PackedModel, device: torch.device) -> None:
    """Give tensors without memory their memory, a slice for each sharded parameter."""
    packed._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Find the decoder layers by their number, because their name depends on the architecture."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():  # outermost first, so that a layer's experts are not found
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(
        f"{type(model).__name__} has no list of {count} decoder layers to shard; use "
        "train.backend = 'single'"
    )


def _split_layers(model: PreTrainedModel, layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    shape, ranks = model_shape(model.config), mesh.size()
    for count, of in ((shape.kv_heads, "key-value heads"), (shape.mlp, "MLP units")):
        if count % ranks:
            raise ConfigError(
                f"train.tensor_parallel = {ranks} does not divide the model's {count} {of}; use a "
                "divisor"
            )
    for layer in layers:
        # A list: all ranks must split the layers in the same order.
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() for name in names if name.endswith(COLUMNS)
        }
        plan |= {name: RowwiseParallel() for name in names if name.endswith(ROWS)}
        if len(plan) != len(names) or len(plan) != len(COLUMNS + ROWS):
            raise ModelError(
                f"{type(model).__name__}: tensor parallelism supports only decoder layers with the "
                f"linear layers {', '.join(COLUMNS + ROWS)}; set train.tensor_parallel = 1"
            )
        parallelize_module(layer, mesh, plan)


def local_slice(tensor: Tensor) -> Tensor:
    """Return this rank's slice, which shares the tensor's memory."""
    assert isinstance(tensor, DTensor), "all parameters are sharded"
    with torch.no_grad():
        return tensor.to_local()


def region_at(parameter: DTensor, coordinate: Sequence[int]) -> Region:
    """Return the part of the full tensor that the rank at a coordinate of its mesh holds.

    Tensor parallelism, the last dimension of the mesh, splits first; FSDP splits the remainder.
    """
    mesh = parameter.device_mesh
    region = [slice(0, size) for size in parameter.shape]
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if not placement.is_replicate():
            # Every other placement is a kind of Shard.
            part = region[placement.dim]  # type: ignore[attr-defined]
            size = -(-(part.stop - part.start) // mesh.size(axis))
            start = min(part.stop, part.start + size * coordinate[axis])
            region[placement.dim] = slice(start, min(part.stop, start + size))  # type: ignore[attr-defined]
    return tuple(region)
