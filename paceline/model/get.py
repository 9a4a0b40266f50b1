"""Models as Hugging Face directories: converted from a GGUF file or downloaded."""

from pathlib import Path

from paceline.errors import ModelError
from paceline.model.gguf_cache import Progress, convert_once, convert_to, gguf_file
from paceline.model.hub import download_model
from paceline.model.source import model_source


def get_model(name: str, folder: Path | None = None, progress: Progress | None = None) -> Path:
    """Return the directory of a model, which is written if it does not exist.

    Without `folder`, it is in the cache of Paceline or of the Hugging Face hub.
    """
    source = model_source(name)
    file = gguf_file(source)
    if file is None and Path(source).exists():
        raise ModelError(
            f"{source} is a Hugging Face directory already; use model={source}. Expected a GGUF "
            "file or a Hugging Face model ID"
        )
    if file is None:
        return download_model(source, folder)
    if folder is None:
        return convert_once(file, progress)
    return convert_to(file, folder, progress)
