"""Files of a trained model in a checkpoint, the same for all backends and numbers of ranks.

`actor/` and `critic/` hold unsharded weights: the actor's in Hugging Face format, the critic's by
name in memory. `training/` holds AdamW's state as "key:name". Tensors are gathered and written one
at a time, and each rank reads only its part, so no process holds a second model.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from paceline.errors import CheckpointError
from paceline.model.hub_names import TensorFormat
from paceline.model.tensor_file import (
    Layout,
    Region,
    Shape,
    TensorFiles,
    write_shards,
    write_tensors,
)
from paceline.remote.group import is_first_rank
from paceline.training.optimizer import STATE, load_optimizer_state
from paceline.training.packed import Head
from paceline.types import Role

# Outside of the model's directory: engines read every safetensors file there.
TRAINING, OPTIMIZER_FILE = "training", "optimizer.safetensors"


def role_of(head: Head) -> Role:
    return Role.ACTOR if head == "policy" else Role.CRITIC


def optimizer_file(checkpoint: Path, head: Head) -> Path:
    return checkpoint / TRAINING / role_of(head) / OPTIMIZER_FILE


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (all ranks must call it); return any other tensor detached."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def write_model(
    folder: Path,
    form: TensorFormat,
    config: PretrainedConfig,
    layout: Layout,
    tensors: Iterable[Tensor],
) -> None:
    """Write a model directory from tensors that arrive one by one in the order of `layout`.

    All ranks must call it, to take part in gathering; rank 0 writes.
    """
    if not is_first_rank():
        deque(tensors, maxlen=0)
        return
    folder.mkdir(parents=True, exist_ok=True)
    named = zip((name for name, *_ in layout), tensors, strict=True)
    write_shards(folder, form.layout(layout), (tensor for _, tensor in form.to_files(named)))
    form.write_config(config, folder)


def write_gathered(path: Path, layout: Layout, tensors: Iterable[Tensor]) -> None:
    """Write tensors under their names. All ranks must call it; rank 0 writes."""
    if is_first_rank():
        write_tensors(path, layout, tensors)
    else:
        deque(tensors, maxlen=0)


def save_optimizer(checkpoint: Path, head: Head, state: Mapping[str, Tensor]) -> None:
    """Write optimizer state, sharded or not. All ranks must call it; rank 0 writes."""
    path = optimizer_file(checkpoint, head)
    write_gathered(path, layout_of(state), map(full_tensor, state.values()))


def load_training(
    checkpoint: Path,
    head: Head,
    files: TensorFiles,
    form: TensorFormat,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    region: Callable[[str], Region] = lambda name: (),
) -> None:
    """Load saved weights from `files`, and optimizer state, in place, all or nothing.

    `tensors` are this rank's parts of what `form` describes; `parameters` are those of them that
    the optimizer updates. `region` returns which part this rank holds. Raises CheckpointError.
    """
    check_same_model(files.path, form.stored_shapes(), files.shapes())
    saved = TensorFiles([optimizer_file(checkpoint, head)])
    try:
        weights = dict(form.from_files(files, region))
        state = {key: saved.read(key, _state_region(key, parameters, region)) for key in saved}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the trained model in {checkpoint}: {error}") from error
    load_optimizer_state(optimizer, dict(parameters), state)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])


def check_same_model(path: Path, own: Mapping[str, Shape], saved: Mapping[str, Shape]) -> None:
    if own != saved:
        name = min(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        raise CheckpointError(
            f"{path} belongs to another model: the shape of {name} is {saved.get(name)} there and "
            f"{own.get(name)} in this run"
        )


def _state_region(
    key: str, parameters: Mapping[str, nn.Parameter], region: Callable[[str], Region]
) -> Region:
    kind, _, name = key.partition(":")
    return region(name) if kind in STATE[1:] and name in parameters else ()
