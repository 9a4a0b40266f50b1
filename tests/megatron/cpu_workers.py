"""Workers of a run that use Megatron on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@contextmanager
def cpu_workers() -> Iterator[None]:
    """Let workers patch Megatron for the CPU when they start, and start them without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.workers.layout.check_backend", lambda *_: None)
        patch.setenv("PYTHONPATH", f"{HERE / 'workers'}:{HERE.parents[1]}")
        yield
