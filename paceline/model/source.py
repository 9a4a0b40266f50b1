"""Where a model comes from: a local directory, a GGUF file or a Hugging Face model ID.

Checks names and files without importing torch, so that a mistake is reported at once.
"""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelError

WEIGHTS = ("*.safetensors", "*.gguf", "pytorch_model*.bin")
EXPECTED = (
    "expected a model directory, a GGUF file, a Hugging Face model ID such as "
    "'Qwen/Qwen2.5-0.5B', or 'tiny'"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The arguments with which transformers loads a model, and its local weight files."""

    name: str  # directory or Hugging Face model ID
    gguf: str | None = None  # name of the GGUF file to load from that directory

    @property
    def options(self) -> dict[str, Any]:
        # Unless the option is False, transformers asks in the terminal whether to run their code.
        options: dict[str, Any] = {"trust_remote_code": False}
        return options | ({"gguf_file": self.gguf} if self.gguf else {})

    @property
    def is_local(self) -> bool:
        return Path(self.name).is_dir()

    @property
    def weights(self) -> list[Path]:
        folder = Path(self.name)
        if self.gguf:
            return [folder / self.gguf]
        return sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))


def model_source(name: str, setting: str = "model") -> str:
    """Check a local directory or GGUF file, or accept a Hugging Face model ID as it is."""
    path = Path(os.path.expanduser(name))  # Path.expanduser fails if there is no such user
    if name and path.exists():  # the empty path is that of this directory
        return str(_checked(path, setting))
    is_path = name.startswith(("/", ".", "~", "runs/")) or name.endswith(("/", ".gguf"))
    if is_path or name.count("/") != 1:
        raise ModelError(
            f"{setting} = {name!r}: no such file or directory (looked from {Path.cwd()})"
            f"{_similar(path)}; {EXPECTED}"
        )
    return name


def model_files(source: str) -> ModelFiles:
    """Return what to load for a source that `model_source` accepted."""
    path = Path(source)
    if path.is_file():
        return ModelFiles(str(path.parent), path.name)
    if not path.is_dir() or (path / "config.json").exists():
        return ModelFiles(source)
    return ModelFiles(source, next(path.glob("*.gguf")).name)


def _checked(path: Path, setting: str) -> Path:
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ModelError(
            f"{setting} = {str(path)!r} is a file; {EXPECTED}. The directory of this file is "
            f"{str(path.parent)!r}"
        )
    weights = [file for pattern in WEIGHTS for file in path.glob(pattern)]
    if not weights:
        raise ModelError(
            f"model directory {path} has no weights (looked for {', '.join(WEIGHTS)})"
            + _model_inside(path)
        )
    gguf = [file.name for file in weights if file.suffix == ".gguf"]
    if len(gguf) != 1 and not (path / "config.json").exists():
        raise ModelError(
            f"model directory {path} has no config.json"
            + (
                f" and {len(gguf)} GGUF files; select one: model={path / gguf[0]}"
                if gguf
                else "; add the one of its weights, or download the model again"
            )
        )
    return path


def _model_inside(path: Path) -> str:
    """Suggest the newest model inside of a run directory or checkpoint."""
    patterns = ("checkpoints/step_*/actor", "step_*/actor", "actor")
    found = [model for pattern in patterns for model in sorted(path.glob(pattern))]
    return f"; did you mean model={found[-1]}?" if found else ""


def _similar(path: Path) -> str:
    near = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, near, n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else ""
