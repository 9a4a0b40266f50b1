"""Datasets of the Hugging Face hub, read with the library `datasets`."""

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import DataError


def load_hub_dataset(name: str) -> Iterable[Mapping[str, Any]]:
    """Return the rows of "owner/name" or "owner/name:split"; the default split is "train"."""
    try:
        from datasets import load_dataset
    except ImportError as e:
        raise DataError(
            f"data {name!r} is neither a file nor a task; as a dataset of the Hugging Face hub it "
            'requires the library datasets: pip install "paceline[datasets]"'
        ) from e
    path, _, split = name.partition(":")
    try:
        return load_dataset(path, split=split or "train")
    except Exception as e:  # the library raises many kinds
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise DataError(
            f"data {name!r} is neither a file nor a task, and no dataset of the Hugging Face hub "
            f"was loaded: {reason}"
        ) from e
