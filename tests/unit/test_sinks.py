"""Metrics sinks: they get every step, and none can delay or end a run."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from examples.custom_sink import CsvFile
from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError
from paceline.observe import sinks
from paceline.observe.sinks import open_sinks
from paceline.observe.trackers import Tracker
from paceline.plugins import Plugin
from tests.exceptions import Speechless

CONFIG = {"steps": 2}


def run(code: Any, folder: Path, steps: int = 2) -> None:
    opened = open_sinks([Plugin.of(code)], folder, CONFIG)
    for step in range(1, steps + 1):
        opened.put(step, {"reward/mean": step / 2})
    opened.close()


def test_function_gets_every_step_in_order(tmp_path: Path) -> None:
    seen: list[Any] = []
    run(lambda step, metrics: seen.append((step, metrics)), tmp_path)
    assert seen == [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 1.0})]


def test_example_class_writes_file_in_run_dir(tmp_path: Path) -> None:
    run(CsvFile, tmp_path)
    assert (tmp_path / "reward.csv").read_text() == "1,0.5000\n2,1.0000\n"


def test_class_gets_parameters_that_it_names_then_closes(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Sink:
        def __init__(self, config: dict[str, Any], run_dir: Path) -> None:
            seen.append((config, run_dir))

        def __call__(self, step: int, metrics: dict[str, float]) -> None:
            seen.append(step)

        def close(self) -> None:
            seen.append("closed")

    run(Sink, tmp_path)
    assert seen == [(CONFIG, tmp_path), 1, 2, "closed"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("disk full"), "OSError: disk full"),
        (SystemExit(0), "SystemExit: 0"),
        (Speechless(), "Speechless: (its text cannot be shown: RuntimeError)"),
    ],
    ids=["error", "exit", "without text"],
)
def test_sink_that_raises_is_disabled_with_one_warning(
    error: BaseException, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: int, metrics: dict[str, float]) -> None:
        raise error

    with caplog.at_level(logging.WARNING):
        run(fail, tmp_path, steps=5)
    (record,) = caplog.records
    assert f"fail' raised {text}; it gets no more metrics" in record.getMessage()


def test_slow_sink_does_not_delay_put_or_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_TIMEOUT_S", 0.05)
    released = threading.Event()
    run(lambda step, metrics: released.wait(60), tmp_path, steps=sinks.MAX_BEHIND + 5)
    released.set()
    assert "too slow: 1000 calls wait" in caplog.text
    assert "has not finished within 0.05 s" in caplog.text


async def asynchronous(step: int, metrics: dict[str, float]) -> None: ...


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (type("Sink", (), {}), "is not callable; expected a method __call__"),
        (type("Sink", (), {"__init__": lambda self, path: None}), "has the parameter 'path'"),
        (type("Sink", (), {"__init__": lambda self: 1 / 0}), "raised ZeroDivisionError"),
        (
            lambda metrics: None,
            r"cannot be called: too many .* expected a function of \(step, metr",
        ),
        (asynchronous, "is async; expected a function"),
        (type("Sink", (), {"__call__": asynchronous}), "is async; expected a function"),
    ],
)
def test_sink_that_cannot_be_made_is_config_error(code: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sinks([Plugin.of(code)], tmp_path, CONFIG)


def test_track_accepts_one_sink_or_several() -> None:
    spec = "examples/custom_sink.py:CsvFile"
    assert load_config(None, [f"track={spec}"]).track == (Plugin.of(spec),)
    assert RunConfig(track=[spec, CsvFile]).track == (Plugin.of(spec), Plugin.of(CsvFile))  # type: ignore[arg-type]


def test_track_rejects_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"track: 'wand' is neither .* did you mean 'wandb'"):
        load_config(None, ["track=wand"])


def test_track_rejects_tracker_that_is_named_twice() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        load_config(None, ['track=["wandb", "wandb"]'])


def test_track_accepts_functions_of_one_name() -> None:
    first, second = lambda step, metrics: None, lambda step, metrics: None
    assert len(RunConfig(track=[first, second]).track) == 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="named twice"):
        RunConfig(track=[first, first])  # type: ignore[arg-type]


def test_object_with_methods_for_them_gets_samples_and_summary(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Sink:
        def __call__(self, step: int, metrics: dict[str, float]) -> None: ...

        def log_samples(self, step: int, groups: list[dict[str, Any]]) -> None:
            seen.append((step, groups))

        def log_summary(self, summary: dict[str, Any]) -> None:
            seen.append(summary)

    opened = open_sinks([Plugin.of(Sink), Plugin.of(lambda step, metrics: None)], tmp_path, CONFIG)
    opened.log_samples(1, [{"prompt": "2"}])
    opened.log_summary({"steps": 1})
    opened.close()
    assert seen == [(1, [{"prompt": "2"}]), {"steps": 1}]


def test_tracker_logs_no_table_when_no_samples_are_saved(tmp_path: Path) -> None:
    Tracker("tensorboard", tmp_path, CONFIG).log_samples(1, [])
    assert list(tmp_path.rglob("*")) == [tmp_path / "trackers"]
