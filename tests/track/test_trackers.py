"""Each tracker, with its real package, stores the same run under the same names."""

import logging
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.config import TRACKERS
from paceline.observe.sinks import Sinks, open_sinks
from paceline.plugins import Plugin
from tests.track.readers import READERS

CONFIG = {"steps": 5, "seed": 7}
SUMMARY = {"steps": 5, "reward_last": 0.75, "ledger": {"issued": 80}}


def open_all(run_dir: Path, *names: str, goes_back: bool = False) -> Sinks:
    return open_sinks([Plugin.of(name) for name in names], run_dir, CONFIG, goes_back)


def put(sinks: Sinks, step: int, others: Mapping[str, float] = {}) -> None:
    sinks.put(step, {"reward/mean": step / 4, "train/loss": float("nan"), **others})
    sinks.log_samples(step, [sample(step)])


def sample(step: int) -> dict[str, Any]:
    completion = {"reward": 1.0, "tokens": 3, "text": f"<b>a{step}</b>\n# not a heading"}
    return {"step": step, "prompt": "sort: 3 1", "staleness": 0, "completions": [completion]}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("paceline") and record.levelno >= logging.WARNING
    ]


@pytest.mark.parametrize("name", TRACKERS)
def test_resumed_run_continues_in_tracker_and_no_step_is_logged_twice(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / f"resumed-{name}"
    run_dir.mkdir()
    sinks = open_all(run_dir, name)
    for step in (1, 2, 3):
        put(sinks, step)
    sinks.put(2, {"evaluation/pass@1": 0.5, "evaluation/step": 2.0})  # after later steps
    sinks.close()
    sinks = open_all(run_dir, name)
    put(sinks, 3, {"evaluation/pass@1": 0.5, "evaluation/step": 2.0})  # both once more
    for step in (4, 5):
        put(sinks, step)
    sinks.put(5, {"evaluation/pass@1": 1.0, "evaluation/step": 5.0})
    sinks.log_summary(SUMMARY)
    sinks.close()

    assert warnings(caplog) == []
    stored = READERS[name](run_dir)
    assert stored.points["reward/mean"] == [(step, step / 4) for step in range(1, 6)]
    assert "train/loss" not in stored.points
    passed = stored.points["evaluation/pass_at_1" if name == "mlflow" else "evaluation/pass@1"]
    assert [value for _, value in passed] == [0.5, 1.0]
    assert [value for _, value in stored.points["evaluation/step"]] == [2.0, 5.0]
    assert stored.settings["steps"] == 5 and stored.settings["seed"] == 7
    assert "a1" in stored.samples and "sort: 3 1" in stored.samples
    assert "a2" not in stored.samples
    assert "reward_last" in stored.summary and "0.75" in stored.summary
    assert "ledger.issued" in stored.summary


def test_run_that_goes_back_to_an_earlier_step_begins_a_new_run(tmp_path: Path) -> None:
    for goes_back in (False, True):
        sinks = open_all(tmp_path, "wandb", goes_back=goes_back)
        put(sinks, 1)
        sinks.close()
    forget_wandb_settings()  # and wait for its files
    names = {file.name for file in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert len(names) == 2


def forget_wandb_settings() -> None:
    """Let wandb read its environment variables again, which it does once in a process."""
    import wandb

    wandb.teardown()


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Return the address of a server that accepts connections and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_wandb_records_offline_with_one_warning_when_its_server_is_silent(
    tmp_path: Path,
    silent_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from paceline.observe.trackers import wandb

    forget_wandb_settings()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", silent_server)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr(wandb, "CONNECT_TIMEOUT_S", 1.0)
    sinks = open_all(tmp_path, "wandb")
    put(sinks, 1)
    sinks.close()
    (message,) = warnings(caplog)
    assert "did not respond" in message and "wandb sync" in message
    assert READERS["wandb"](tmp_path).points["reward/mean"] == [(1, 0.25)]


def test_wandb_records_offline_without_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_wandb_settings()
    monkeypatch.delenv("WANDB_MODE")
    sinks = open_all(tmp_path, "wandb")
    put(sinks, 1)
    sinks.close()
    (message,) = warnings(caplog)
    assert "has no API key" in message
    assert READERS["wandb"](tmp_path).points["reward/mean"] == [(1, 0.25)]


def test_mlflow_is_disabled_with_one_warning_when_its_server_is_silent(
    tmp_path: Path,
    silent_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent_server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sinks = open_all(tmp_path, "mlflow")
    for step in range(1, 5):
        put(sinks, step)
    sinks.close()
    (message,) = warnings(caplog)
    assert message.startswith("sink 'mlflow' raised") and "no more metrics" in message
