"""Trackers without an account or a network, with their files in a temporary directory."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# trackio and wandb read these when they are imported.
_folder = tempfile.mkdtemp(prefix="paceline-track-")
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_TRACKING_URI": f"file://{_folder}/mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # creating a database takes six seconds
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TRACKIO_DIR": f"{_folder}/trackio",
    "WANDB_MODE": "offline",
    "WANDB_CONFIG_DIR": f"{_folder}/wandb",
    "WANDB_CACHE_DIR": f"{_folder}/wandb",
    "WANDB_DATA_DIR": f"{_folder}/wandb",
    "WANDB_ERROR_REPORTING": "false",
    "NETRC": f"{_folder}/netrc",
}
for _name in ("WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_SPACE_ID"):
    os.environ.pop(_name, None)


@pytest.fixture(scope="session", autouse=True)
def _files() -> Iterator[None]:
    yield
    shutil.rmtree(_folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for slow imports of the packages on a loaded machine."""
    monkeypatch.setattr("paceline.observe.trackers.Tracker.close_timeout_s", 200.0)
