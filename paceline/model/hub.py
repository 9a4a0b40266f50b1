"""The Hugging Face hub: whether it has a model, and downloads of whole models."""

from pathlib import Path

from paceline.errors import ModelError
from paceline.model.source import EXPECTED, model_source

TIMEOUT_S = 3.0
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")


def check_hub_model(name: str, setting: str = "model") -> None:
    """Raise ModelError if the hub has no such model. Local files and cached models need no hub.

    An unreachable hub is not an error here: loading the model tries again for longer.
    """
    if Path(name).expanduser().exists():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        HfApi().model_info(name, timeout=TIMEOUT_S)
    except HFValidationError:
        raise ModelError(
            f"{setting} = {name!r}: no such file or directory, and not a valid Hugging Face model "
            f"ID; {EXPECTED}"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{setting} = {name!r}: the Hugging Face hub has no such model; check the spelling, or "
            "run `hf auth login` if the model is private"
        ) from None
    except OfflineModeIsEnabled:
        raise ModelError(
            f"{setting} = {name!r} is not in the cache of Hugging Face models, and HF_HUB_OFFLINE "
            "forbids to download it; use a cached model or a local directory"
        ) from None
    except Exception:  # no connection, a proxy, a mirror without this function
        return


def download_model(name: str, folder: Path | None = None) -> Path:
    """Download weights, config and tokenizer to a directory, by default in the hub's cache."""
    check_hub_model(name)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, local_dir=folder, allow_patterns=list(FILES))
    except Exception as error:  # the hub and its transports raise dozens of types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"cannot get model {name!r} from the Hugging Face hub: {reason.rstrip('.')}. Without "
            "network, use a local directory or a GGUF file"
        ) from error
    return Path(model_source(str(found)))
