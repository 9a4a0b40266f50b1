"""Fixtures that several modules of unit tests use."""

from pathlib import Path

import pytest

from tests.scoring import write_functions


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with reward functions, most of which misbehave."""
    return write_functions(tmp_path_factory.mktemp("rewards"))


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: on AMD processors, engines pack matrices of every size in the second."""
    if request.param:
        monkeypatch.setattr("paceline.model.linear.LARGE_MATRIX", 1)
