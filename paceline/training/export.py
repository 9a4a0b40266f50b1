"""Export of a trained model from a checkpoint to a directory of its own.

A checkpoint's `actor/` already has the format of Hugging Face. An export can have another dtype and
other shards; weights are converted one tensor at a time.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.errors import CheckpointError, ConfigError
from paceline.model.hub_names import float32_parts
from paceline.model.loading import load_config
from paceline.model.tensor_file import INDEX_FILE, TensorFiles, write_shards, write_tensors
from paceline.training.checkpoint import MANIFEST, latest_checkpoint, read_state, verify_checkpoint
from paceline.training.lora import CONFIG, FOLDER, WEIGHTS
from paceline.types import Role

MARK = "paceline.json"  # identifies an export, which may be replaced by another
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True)
class Export:
    folder: Path
    step: int
    files: int
    bytes: int


def export_model(
    source: Path,
    step: int | None = None,
    *,
    to: Path | None = None,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    adapter: bool = False,
    force: bool = False,
) -> Export:
    """Write the trained model of a run directory or a checkpoint as a Hugging Face model.

    `adapter`: write only the adapter of a LoRA run, for PEFT. `force`: replace an earlier export.
    """
    limit = parse_size(max_shard_size)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
    checkpoint = find_checkpoint(source, step)
    actor = checkpoint / Role.ACTOR
    if adapter and not (actor / FOLDER).is_dir():
        raise CheckpointError(
            f"{checkpoint} has no adapter: the run did not set train.lora. Export the whole model "
            "instead (without --adapter)"
        )
    to = to or _default_folder(checkpoint, adapter)
    _check_target(to, force)
    temporary = to.with_name(f".{to.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        if adapter:
            _write_adapter(actor, temporary, DTYPES[dtype])
        else:
            _write_model(actor, temporary, DTYPES[dtype], limit)
        number = int(read_state(checkpoint)["step"])
        mark = {"paceline": __version__, "step": number, "dtype": dtype}
        (temporary / MARK).write_text(json.dumps(mark, indent=1) + "\n")
        shutil.rmtree(to, ignore_errors=True)
        temporary.rename(to)
    except OSError as error:
        raise CheckpointError(f"cannot write the export to {to}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files = list(to.glob("*.safetensors"))
    return Export(to, number, len(files), sum(file.stat().st_size for file in files))


def find_checkpoint(source: Path, step: int | None = None) -> Path:
    """Return a complete checkpoint: of a run directory the newest or that of `step`, or itself."""
    if source.name == Role.ACTOR and (source.parent / MANIFEST).exists():
        source = source.parent
    if (source / MANIFEST).exists():
        if step is not None and int(read_state(source)["step"]) != step:
            raise CheckpointError(f"{source} is not the checkpoint of step {step}; omit --step")
        verify_checkpoint(source)
        return source
    root = source / "checkpoints"
    saved = sorted(path.name for path in root.glob("step_*") if path.is_dir())
    if not saved:
        raise CheckpointError(
            f"{source} has no checkpoint; expected a run directory with checkpoints/step_N, or a "
            "checkpoint. A run writes one every save_every steps and at its end"
        )
    if step is None:
        found = latest_checkpoint(root)
        if found is None:
            raise CheckpointError(f"no checkpoint in {root} is complete; restore one from a backup")
        return found
    found = root / f"step_{step:08d}"
    if found.name not in saved:
        steps = ", ".join(str(int(name.removeprefix("step_"))) for name in saved)
        raise CheckpointError(f"{source} has no checkpoint of step {step}; it has those of {steps}")
    verify_checkpoint(found)
    return found


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "5GB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]B)", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if size <= 0:
        raise ConfigError(
            f"max_shard_size = {text!r}: expected a number and a unit, for example 5GB or 500MB"
        )
    return size


def _default_folder(checkpoint: Path, adapter: bool) -> Path:
    root = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else Path.cwd()
    return root / "export" / (checkpoint.name + "-adapter" * adapter)


def _check_target(to: Path, force: bool) -> None:
    if not to.exists() or (to.is_dir() and not any(to.iterdir())):
        return
    if not to.is_dir() or not (to / MARK).exists():
        raise CheckpointError(
            f"{to} exists and is not an earlier export; expected a new or empty directory. Choose "
            "another one with --to"
        )
    if not force:
        raise CheckpointError(
            f"{to} has an earlier export; replace it with --force, or choose another directory "
            "with --to"
        )


def _write_model(actor: Path, to: Path, dtype: torch.dtype, limit: int) -> None:
    files, wide = TensorFiles.of_model(actor), float32_parts(load_config(str(actor)), dtype)
    _copy_files(actor, to)
    config = json.loads((actor / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(_with_dtype(config, dtype), indent=2) + "\n")
    _write(files, dtype, wide, lambda layout, tensors: write_shards(to, layout, tensors, limit))


def _write_adapter(actor: Path, to: Path, dtype: torch.dtype) -> None:
    folder = actor / FOLDER
    shutil.copy2(folder / CONFIG, to / CONFIG)
    card = actor / "README.md"
    if card.exists():
        text = card.read_text(encoding="utf-8")
        text = text.replace("library_name: transformers", "library_name: peft")
        (to / card.name).write_text(text.replace(", merged into the weights", ""), encoding="utf-8")
    files = TensorFiles([folder / WEIGHTS])
    _write(files, dtype, (), lambda layout, tensors: write_tensors(to / WEIGHTS, layout, tensors))


def _write(
    files: TensorFiles, dtype: torch.dtype, wide: tuple[str, ...], write: Callable[..., None]
) -> None:
    layout = [
        (name, shape, _dtype_of(name, found, dtype, wide)) for name, shape, found in files.layout()
    ]
    write(layout, (files[name].to(target) for name, _, target in layout))


def _dtype_of(
    name: str, found: torch.dtype, dtype: torch.dtype, wide: tuple[str, ...]
) -> torch.dtype:
    if not found.is_floating_point:
        return found
    return torch.float32 if any(re.search(part, name) for part in wide) else dtype


def _copy_files(actor: Path, to: Path) -> None:
    """Copy tokenizer, generation config and model card."""
    written = {INDEX_FILE, "config.json", *(path.name for path in actor.glob("*.safetensors"))}
    for path in actor.iterdir():
        if path.is_file() and path.name not in written:
            shutil.copy2(path, to / path.name)


def _with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Set the dtype in a configuration and in those nested in it."""
    return {
        key: _with_dtype(value, dtype)
        if isinstance(value, dict)
        else str(dtype).removeprefix("torch.")
        if key == "dtype"
        else value
        for key, value in config.items()
    }
