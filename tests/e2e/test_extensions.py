"""Runs with custom advantage, loss, correction, prompt source and sink, wherever training runs."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from paceline.config import load_config
from paceline.errors import ConfigError, PacelineError
from paceline.run import train
from tests.processes import children
from tests.small_runs import SEPARATE, SMALL, steps_of, weights

EXAMPLES = Path(__file__).parents[2] / "examples"
FSDP = ["train.backend=fsdp", "placement.train_ranks=2"]
PLACES = {"in the engine's process": [], "in a process": SEPARATE, "on two ranks": FSDP}
OTHER_PLACES = [pytest.param(p, marks=pytest.mark.slow) for p in ("in a process", "on two ranks")]
ALL_PLACES = ["in the engine's process", *OTHER_PLACES]


def run(model: str, folder: Path, *settings: str, **values: Any) -> dict[str, Any]:
    chosen = [f"model={model}", f"run_dir={folder}", *SMALL, *settings]
    try:
        return asyncio.run(train(load_config(None, chosen, values)))
    finally:
        assert not children()


@pytest.mark.parametrize("place", ALL_PLACES)
def test_all_examples_train_together(model: str, tmp_path: Path, place: str) -> None:
    custom = [
        f"algorithm.advantage={EXAMPLES}/custom_advantage.py:minus_median",
        f"algorithm.loss={EXAMPLES}/custom_loss.py:clip",
        f"algorithm.correction={EXAMPLES}/custom_correction.py:mean_one",
        f"data.source={EXAMPLES}/custom_source.py:rows",
        f"track={EXAMPLES}/custom_sink.py:CsvFile",
    ]
    settings = [s for s in SMALL if not s.startswith("data.task")]
    chosen = [f"model={model}", f"run_dir={tmp_path}", *settings, *custom, *PLACES[place]]
    summary = asyncio.run(train(load_config(None, [*chosen, "steps=2"])))
    assert summary["steps"] == 2 and len((tmp_path / "reward.csv").read_text().splitlines()) == 2
    saved = json.loads((tmp_path / "settings.json").read_text())
    assert saved["algorithm"]["loss"] == f"{EXAMPLES}/custom_loss.py:clip"


ENTRY_POINTS = {  # setting, and the function of examples/custom_<kind>.py
    "advantage": ("algorithm.advantage", "paceline.advantages", "minus_median"),
    "loss": ("algorithm.loss", "paceline.losses", "clip"),
    "correction": ("algorithm.correction", "paceline.corrections", "mean_one"),
    "source": ("data.source", "paceline.sources", "rows"),
    "sink": ("track", "paceline.sinks", "CsvFile"),
}


def install_package(folder: Path) -> None:
    """Install a package with an entry point `my_<kind>` for each custom function, as pip does."""
    info = folder / "my_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = []
    for kind, (_, group, function) in ENTRY_POINTS.items():
        shutil.copy(EXAMPLES / f"custom_{kind}.py", folder / f"my_package_{kind}.py")
        lines.append(f"[{group}]\nmy_{kind} = my_package_{kind}:{function}\n")
    (info / "entry_points.txt").write_text("".join(lines))


def test_entry_points_of_installed_package_train_together(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    paths = os.pathsep.join(filter(None, [*sys.path[:1], os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", paths)  # for the workers
    custom = [f"{setting}=my_{kind}" for kind, (setting, *_) in ENTRY_POINTS.items()]
    settings = [s for s in SMALL if not s.startswith("data.task")]
    chosen = [f"model={model}", f"run_dir={tmp_path / 'run'}", *settings, *custom, *SEPARATE]
    summary = asyncio.run(train(load_config(None, [*chosen, "steps=1"])))
    assert summary["steps"] == 1 and (tmp_path / "run" / "reward.csv").exists()
    saved = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert saved["algorithm"]["loss"] == "my_loss" and saved["data"]["source"] == "my_source"


@pytest.mark.parametrize("place", OTHER_PLACES)
def test_function_of_program_trains_like_built_in_loss(
    model: str, tmp_path: Path, place: str
) -> None:
    scale = 1.0  # a closure, so that only its value can reach another process

    def plain(logprobs: Tensor, advantages: Tensor) -> Tensor:
        return scale * -advantages * logprobs

    run(model, tmp_path / "own", "steps=2", *PLACES[place], algorithm={"loss": plain})
    # A process does not change the weights (test_runs.py); ranks do, by rounding.
    same = [] if place == "in a process" else PLACES[place]
    run(model, tmp_path / "pg", "steps=2", *same, algorithm={"loss": "pg"})
    assert weights(tmp_path / "own", 2) == weights(tmp_path / "pg", 2)


@pytest.mark.parametrize("place", OTHER_PLACES)
def test_wrong_loss_ends_run_with_its_name(model: str, tmp_path: Path, place: str) -> None:
    with pytest.raises(PacelineError, match=r"algorithm\.loss = '.*<lambda>' returned NaN"):
        run(model, tmp_path, *PLACES[place], algorithm={"loss": lambda logprobs: logprobs / 0})
    assert not (tmp_path / "metrics.jsonl").read_text(), "it is found in the first step"


def test_wrong_advantage_ends_run_with_its_name(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage = '.*<lambda>' returned shape"):
        run(model, tmp_path, algorithm={"advantage": lambda rewards: rewards[1:]})


@pytest.mark.slow
def test_resumed_run_on_stream_equals_uninterrupted_run(model: str, tmp_path: Path) -> None:
    settings = [f"data.source={EXAMPLES}/custom_source.py:rows", "data.max_prompt_length=32"]
    chosen = [s for s in SMALL if not s.startswith("data.")] + settings

    def go(folder: str, steps: int) -> None:
        more = [f"model={model}", f"run_dir={tmp_path / folder}", f"steps={steps}"]
        asyncio.run(train(load_config(None, chosen + more)))

    go("whole", 4)
    go("parts", 2)
    go("parts", 4)
    rewards = [[row["reward/mean"] for row in steps_of(tmp_path / f)] for f in ("whole", "parts")]
    assert rewards[0] == rewards[1] and weights(tmp_path / "whole", 4) == weights(
        tmp_path / "parts", 4
    )


def test_changed_custom_function_cannot_resume(model: str, tmp_path: Path) -> None:
    run(model, tmp_path, "steps=1")
    with pytest.raises(PacelineError, match=r"algorithm\.loss: was 'clip', is now '.*custom_loss"):
        run(model, tmp_path, "steps=2", f"algorithm.loss={EXAMPLES}/custom_loss.py:clip")


def test_failing_sink_does_not_end_run(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: int, metrics: dict[str, float]) -> None:
        raise OSError("no connection")

    assert run(model, tmp_path, "steps=2", track=[fail])["steps"] == 2
    assert "fail' raised OSError: no connection; it gets no more metrics" in caplog.text


@pytest.mark.parametrize("part", ["advantage", "loss", "correction", "source", "sink"])
def test_example_is_short(part: str) -> None:
    assert len((EXAMPLES / f"custom_{part}.py").read_text().splitlines()) <= 15
