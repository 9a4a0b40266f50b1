"""GGUF files as Hugging Face directories: each file is converted once, later starts use the result.

The name of a directory in the cache contains a hash of the path, size and modification time of the
GGUF file. A directory is written under a temporary name and renamed when it is complete. Its file
`converted.json` lists the size and a sampled checksum of every file, so that a damaged directory is
noticed and written again.

Waits for: another process that converts the same file.
"""

import fcntl
import glob
import hashlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import ModelError, PacelineError
from paceline.model.cache import (
    install,
    readable_caches,
    sampled_bytes,
    writable_cache,
)
from paceline.model.source import model_files

log = logging.getLogger(__name__)

MARK = "converted.json"
FORMAT = 1  # of a converted directory; a higher one makes earlier directories obsolete
Progress = Callable[[int, int], None]  # (bytes written, bytes of all weights)


def gguf_file(source: str) -> Path | None:
    """Return the GGUF file of a source that `model_source` accepted, if it is one."""
    files = model_files(source)
    return files.weights[0] if files.gguf else None


def converted_model(source: str, progress: Progress | None = None) -> str:
    """Return the converted directory of a GGUF file, and any other source as it is."""
    file = gguf_file(source)
    return str(convert_once(file, progress)) if file else source


def report_conversion(name: str, source: str) -> None:
    """Log where the conversion of a GGUF file is, if `source` is one."""
    if name != source and (Path(source) / MARK).exists():
        log.info("model: %s, converted from %s", source, name)


def convert_once(file: Path, progress: Progress | None = None) -> Path:
    """Return the directory of a GGUF file in the cache; write it if it is missing or damaged."""
    name = _folder_name(file)
    for cache in readable_caches():
        folder = cache / "models" / name
        if is_complete(folder, file):
            return folder
    folder = writable_cache() / "models" / name
    with _explained(file, folder), _locked(folder):
        if not is_complete(folder, file):  # another process may have written it in the meantime
            _remove_remains(folder)
            _write(file, folder, progress)
    return folder


def convert_to(file: Path, folder: Path, progress: Progress | None = None) -> Path:
    """Write the directory of a GGUF file outside of the cache; return its absolute path."""
    folder = folder.expanduser().absolute()
    if is_complete(folder, file):
        return folder
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ModelError(
            f"{folder} exists and is not a conversion of {file}; expected a new or empty "
            "directory. Choose another one, or remove it"
        )
    with _explained(file, folder):
        _write(file, folder, progress)
    return folder


def is_complete(folder: Path, file: Path) -> bool:
    """Return whether a directory is the undamaged conversion of this GGUF file as it is now."""
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        if mark["format"] != FORMAT or mark["source"] != _identity(file):
            return False
        files: dict[str, Any] = mark["files"]
        return bool(files) and all(_content(folder / name) == files[name] for name in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _identity(file: Path) -> dict[str, str | int]:
    """Return what changes with the file. To hash its content would take seconds at every start."""
    path, state = file.resolve(), file.stat()
    return {"path": str(path), "size": state.st_size, "mtime_ns": state.st_mtime_ns}


def _folder_name(file: Path) -> str:
    text = json.dumps([FORMAT, _identity(file)], sort_keys=True)
    return f"{file.resolve().stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _content(file: Path) -> dict[str, str | int]:
    digest = hashlib.sha256()
    for part in sampled_bytes(file):
        digest.update(part)
    return {"size": file.stat().st_size, "sampled_sha256": digest.hexdigest()}


def _write(file: Path, folder: Path, progress: Progress | None) -> None:
    identity = _identity(file)

    def build(temporary: Path) -> None:
        write_model = _converter()
        write_model(file, temporary, progress)
        files = {path.name: _content(path) for path in sorted(temporary.iterdir())}
        mark = {"format": FORMAT, "source": identity, "files": files}
        (temporary / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            _fsync(path)

    install(folder, build)
    if not is_complete(folder, file):
        raise ModelError(
            f"{folder} is not a complete conversion of {file}: one of the two was changed "
            "meanwhile; remove the directory and try again"
        )


def _converter() -> Callable[[Path, Path, Progress | None], None]:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("GGUF files require the package gguf; run pip install 'paceline[gguf]'")
    from paceline.model.gguf_conversion import write_model

    return write_model


def _remove_remains(folder: Path) -> None:
    """Remove a damaged directory, and temporary ones of processes that were killed."""
    if folder.exists():
        log.warning("%s is damaged or incomplete: the GGUF file is converted again", folder)
    for path in (folder, *folder.parent.glob(f".{glob.escape(folder.name)}-*")):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time write a directory; the others wait for it."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another process converts the same GGUF file: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(file: Path, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write the conversion of {file} to {folder}: {error.strerror or error}; set "
            "PACELINE_CACHE to a directory with enough space, or write it to a directory of your "
            "choice with `paceline model get`"
        ) from error
    except PacelineError:
        raise
    except Exception as error:  # transformers and the format raise dozens of types
        raise ModelError(
            f"cannot convert {file}: {error or type(error).__name__}; the download may be "
            "incomplete, or transformers does not support this model in a GGUF file"
        ) from error


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
