"""What a train engine leaves on disk: one format for every back end and number of ranks, so that a run can go on with others.

Two safetensors files hold whole tensors under their Hugging Face names: the trained weights, and AdamW's state as "key:name".
Tensors are gathered and written one at a time, and each rank reads only its own part of them, so nobody ever holds a second model.
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
from paceline.train.optimizer import STATE, load_optimizer_state

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
}

Shape = tuple[int, ...]
Region = tuple[slice, ...]  # the part of a tensor that a rank holds; () is all of it
Layout = list[tuple[str, Shape, torch.dtype]]


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks, which must all ask for it; any other as it is."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def save_training(
    folder: Path, trained_file: str, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Write weights and optimizer state, sharded or not. All ranks must call it; the first one writes."""
    for name, tensors in ((trained_file, weights), (OPTIMIZER_FILE, state)):
        layout = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
        write_tensors(folder / name, layout, (whole(tensor) for tensor in tensors.values()))


def write_tensors(path: Path, layout: Layout, tensors: Iterable[Tensor]) -> None:
    """A safetensors file from tensors that come one by one in the order of `layout`. Other ranks than the first only take part."""
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
    """Take over what was saved, in place; all or nothing. `parameters` are this rank's own parts, of tensors that are `shapes` in
    all; `region` says which part."""
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
            f"{path} is of another model: {name} is {saved.get(name)} there and {own.get(name)} here"
        )


def _state_region(
    key: str, parameters: Mapping[str, nn.Parameter], region: Callable[[str], Region]
) -> Region:
    kind, _, name = key.partition(":")
    return region(name) if kind in STATE[1:] and name in parameters else ()


def _read(file: Any, name: str, region: Region) -> Tensor:
    if any(part.start == part.stop for part in region):
        return torch.zeros(
            [part.stop - part.start for part in region]
        )  # a rank may have nothing of a small tensor
    return file.get_slice(name)[region] if region else file.get_tensor(name)
