"""Export of a trained model from a checkpoint to a separate directory.

A checkpoint's `actor/` already has the format of Hugging Face. An export can have another dtype and
other shards. torch is imported only once everything else is known to be valid.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline import __version__
from paceline.errors import CheckpointError, ConfigError, PacelineError
from paceline.training.checkpoint import (
    ADAPTER,
    MANIFEST,
    checkpoint_folders,
    latest_checkpoint,
    read_state,
    verify_checkpoint,
)
from paceline.types import Role

MARK = "paceline.json"  # identifies an export, which may be replaced by another
DTYPES = ("float32", "bfloat16", "float16")
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
    if adapter and not (actor / ADAPTER).is_dir():
        raise CheckpointError(
            f"{checkpoint} has no adapter: the run did not set train.lora. Export the whole model "
            "instead (without --adapter)"
        )
    to = to.expanduser().resolve() if to else _default_folder(checkpoint, adapter)
    if to.is_relative_to(checkpoint):
        raise CheckpointError(
            f"{to} is inside of the checkpoint {checkpoint}, which an export there would damage. "
            "Choose another directory with --to"
        )
    _check_target(to, force)
    temporary = to.with_name(f".{to.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        if adapter:
            _write_adapter(actor, temporary, dtype)
        else:
            _write_model(actor, temporary, dtype, limit)
        number = int(read_state(checkpoint)["step"])
        mark = {"paceline": __version__, "step": number, "dtype": dtype}
        (temporary / MARK).write_text(json.dumps(mark, indent=1) + "\n")
        shutil.rmtree(to, ignore_errors=True)
        temporary.rename(to)
    except (OSError, PacelineError) as error:
        if not checkpoint.exists():
            raise CheckpointError(
                f"{checkpoint} was deleted during the export: an active run keeps only its last "
                "keep_checkpoints checkpoints. Run the command again, or when the run has ended"
            ) from error
        if isinstance(error, PacelineError):
            raise
        raise CheckpointError(f"cannot write the export to {to}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files = list(to.glob("*.safetensors"))
    return Export(to, number, len(files), sum(file.stat().st_size for file in files))


def find_checkpoint(source: Path, step: int | None = None) -> Path:
    """Return a complete checkpoint: of a run directory the newest or that of `step`, or itself."""
    source = source.expanduser().resolve()  # "." has neither a name nor a parent
    if source.name == Role.ACTOR and (source.parent / MANIFEST).exists():
        source = source.parent
    if (source / MANIFEST).exists():
        if step is not None and int(read_state(source)["step"]) != step:
            raise CheckpointError(f"{source} is not the checkpoint of step {step}; omit --step")
        verify_checkpoint(source)
        return source
    root = source / "checkpoints"
    saved = [path.name for path in checkpoint_folders(root)]
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


def _write_model(actor: Path, to: Path, dtype: str, limit: int) -> None:
    from paceline.model.recast import recast_model

    recast_model(actor, to, dtype, limit)
    written = {path.name for path in (*to.iterdir(), *actor.glob("model*.safetensors*"))}
    for path in actor.iterdir():  # tokenizer, generation config and model card
        if path.is_dir() and path.name != ADAPTER:  # named chat templates
            shutil.copytree(path, to / path.name)
        elif path.is_file() and path.name not in written:
            shutil.copy2(path, to / path.name)


def _write_adapter(actor: Path, to: Path, dtype: str) -> None:
    from paceline.model.recast import recast_file

    for path in (actor / ADAPTER).iterdir():
        if path.suffix == ".safetensors":
            recast_file(path, to / path.name, dtype)
        else:
            shutil.copy2(path, to / path.name)
    card = actor / "README.md"
    if card.exists():
        text = card.read_text(encoding="utf-8")
        text = text.replace("library_name: transformers", "library_name: peft")
        (to / card.name).write_text(text.replace(", merged into the weights", ""), encoding="utf-8")
