"""Files of a trained model in a checkpoint, the same for all backends and numbers of ranks.

`actor/` and `critic/` hold unsharded weights: the actor's in Hugging Face format, the critic's by
name in memory. `training/` holds AdamW's state as "key:name". Every rank writes some of the tensors
and reads only its parts, one at a time, so no process holds a second model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    file_names,
    write_shards,
    write_tensors,
)
from paceline.remote.group import is_first_rank
from paceline.training.optimizer import STATE, check_optimizer_state, load_optimizer_state
from paceline.training.packed import Head
from paceline.training.rank_files import Split, Unit, write_files
from paceline.types import Role

# Outside of the model's directory: engines read every safetensors file there.
TRAINING, OPTIMIZER, MODEL = "training", "optimizer", "model"


def role_of(head: Head) -> Role:
    return Role.ACTOR if head == "policy" else Role.CRITIC


def optimizer_folder(checkpoint: Path, head: Head) -> Path:
    return checkpoint / TRAINING / role_of(head)


def open_optimizer(checkpoint: Path, head: Head) -> TensorFiles:
    """Open the optimizer state that any number of ranks wrote."""
    folder = optimizer_folder(checkpoint, head)
    found = sorted(folder.glob(f"{OPTIMIZER}*.safetensors"))
    return TensorFiles(found or [folder / name for name in file_names(1, OPTIMIZER)])


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
    """Write a model directory from tensors that arrive one by one in the order of `layout`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{MODEL}*.safetensors*"):
        old.unlink()
    named = zip((name for name, *_ in layout), tensors, strict=True)
    write_shards(folder, form.layout(layout), (tensor for _, tensor in form.to_files(named)))
    form.write_config(config, folder)


def save_optimizer(checkpoint: Path, head: Head, state: Mapping[str, Tensor]) -> None:
    folder = optimizer_folder(checkpoint, head)
    for old in folder.glob(f"{OPTIMIZER}*.safetensors"):
        old.unlink()
    (name,) = file_names(1, OPTIMIZER)
    write_tensors(folder / name, layout_of(state), (t.detach() for t in state.values()))


def write_model_by_ranks(
    folder: Path,
    form: TensorFormat,
    config: PretrainedConfig,
    splits: Sequence[Split],
    device: torch.device,
) -> None:
    """Write a model directory of which every rank writes a part. All ranks must call it."""
    if is_first_rank():
        form.write_config(config, folder)
    owner = {name: split for split in splits for name, *_ in split.layout}
    units: dict[tuple[str, ...], Unit] = {}
    for split in splits:
        group = form.group(split.layout[0][0])
        if group not in units:
            members = tuple(dict.fromkeys((split, *(owner[name] for name in group))))
            layout = [entry for member in members for entry in member.layout]
            units[group] = Unit(members, form.layout(layout))
    write_files(folder, MODEL, list(units.values()), form.to_files, device, with_index=True)


def save_optimizer_by_ranks(
    checkpoint: Path, head: Head, splits: Sequence[Split], device: torch.device
) -> None:
    """Write optimizer state of which every rank writes a part. All ranks must call it."""
    units = [Unit((split,), split.layout) for split in splits]
    write_files(optimizer_folder(checkpoint, head), OPTIMIZER, units, lambda named: named, device)


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
    """Load saved weights from `files`, and optimizer state, in place, one tensor at a time.

    Nothing is changed if names or shapes are wrong. `tensors` are this rank's parts of what `form`
    describes; `parameters` are those of them that the optimizer updates. `region` returns which
    part this rank holds. Raises CheckpointError.
    """
    check_same_model(files.path, form.stored_shapes(), files.shapes())
    saved = open_optimizer(checkpoint, head)
    check_optimizer_state(saved.shapes(), {name: form.shapes[name] for name in parameters})
    state = _SavedState(saved, parameters, region)
    try:
        load_optimizer_state(optimizer, dict(parameters), state)
        with torch.no_grad():
            for name, tensor in form.from_files(files, region):
                tensors[name].copy_(tensor)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the trained model in {checkpoint}: {error}") from error


def check_same_model(path: Path, own: Mapping[str, Shape], saved: Mapping[str, Shape]) -> None:
    if own != saved:
        name = min(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        raise CheckpointError(
            f"{path} belongs to another model: the shape of {name} is {saved.get(name)} there and "
            f"{own.get(name)} in this run; use a checkpoint of this model"
        )


class _SavedState(Mapping[str, Tensor]):
    """Optimizer state in files; each rank reads the part that belongs to its parameters."""

    def __init__(
        self,
        files: TensorFiles,
        parameters: Mapping[str, nn.Parameter],
        region: Callable[[str], Region],
    ) -> None:
        self._files, self._parameters, self._region = files, parameters, region

    def __getitem__(self, key: str) -> Tensor:
        kind, _, name = key.partition(":")
        is_split = kind in STATE[1:] and name in self._parameters
        return self._files.read(key, self._region(name) if is_split else ())

    def __contains__(self, key: object) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
