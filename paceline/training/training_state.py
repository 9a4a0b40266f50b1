"""File format of trained weights and optimizer state.

All backends and numbers of ranks share it, so a run can resume with a different backend. Two
safetensors files hold unsharded tensors by Hugging Face name: the trained weights, and AdamW's
state as "key:name". Tensors are gathered and written one at a time, and each rank reads only its
part, so no process holds a second model.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import CheckpointError
from paceline.remote.group import is_first_rank
from paceline.training.optimizer import STATE, load_optimizer_state

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
}

Shape = tuple[int, ...]
Region = tuple[slice, ...]  # part of a tensor that a rank holds; () means the full tensor
Layout = list[tuple[str, Shape, torch.dtype]]


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (all ranks must call it); return any other tensor detached."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def save_training(
    folder: Path, trained_file: str, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Write weights and optimizer state, sharded or not. All ranks must call it; rank 0 writes."""
    for name, tensors in ((trained_file, weights), (OPTIMIZER_FILE, state)):
        layout = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
        write_tensors(folder / name, layout, (full_tensor(tensor) for tensor in tensors.values()))


def write_tensors(path: Path, layout: Layout, tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file from tensors that arrive one by one in the order of `layout`.

    Only rank 0 writes; the other ranks consume `tensors` to take part in gathering.
    """
    if not is_first_rank():
        deque(tensors, maxlen=0)
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in layout:
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def load_training(
    folder: Path,
    trained_file: str,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    shapes: Mapping[str, Shape],
    region: Callable[[str], Region] = lambda name: (),
) -> None:
    """Load saved weights and optimizer state in place, all or nothing.

    `parameters` are this rank's parts of tensors with the full shapes `shapes`; `region` returns
    which part this rank holds. Raises CheckpointError.
    """
    try:
        with safe_open(folder / trained_file, "pt") as file:
            check_same_model(
                folder / trained_file,
                shapes,
                {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()},  # noqa: SIM118
            )
            weights = {name: _read(file, name, region(name)) for name in parameters}
        with safe_open(folder / OPTIMIZER_FILE, "pt") as file:
            state = {
                key: _read(file, key, _state_region(key, parameters, region))
                for key in file.keys()  # noqa: SIM118
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the trained model in {folder}: {error}") from error
    load_optimizer_state(optimizer, dict(parameters), state)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


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


def _read(file: Any, name: str, region: Region) -> Tensor:
    if any(part.start == part.stop for part in region):
        # A rank can hold no part of a small tensor.
        return torch.zeros([part.stop - part.start for part in region])
    return file.get_slice(name)[region] if region else file.get_tensor(name)
