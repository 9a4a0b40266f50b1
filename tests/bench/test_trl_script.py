"""One script under TRL and under Paceline: both learn, and alike."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.models import bench_model

ROOT = Path(__file__).parents[2]
LIBRARIES = ("trl", "paceline.trl")
STEPS = "30"


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return the rewards that each library logs."""
    folder = tmp_path_factory.mktemp("script")
    model = bench_model(folder / "model")
    found = {}
    for library in LIBRARIES:
        script = [
            str(ROOT / "benchmarks" / "trl_script.py"),
            library,
            model,
            str(folder / library),
            STEPS,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        result = subprocess.run(
            [sys.executable, *script], capture_output=True, text=True, env=environment
        )
        assert result.returncode == 0, result.stderr[-2000:]
        found[library] = json.loads(result.stdout.splitlines()[-1])["reward"]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", LIBRARIES)
def test_script_learns(curves: dict[str, list[float]], library: str) -> None:
    rewards = curves[library]
    assert rewards[0] < 0.2
    assert fmean(rewards[-2:]) > 0.6


@pytest.mark.timeout(600)
def test_rewards_are_alike_along_the_run(curves: dict[str, list[float]]) -> None:
    theirs, ours = (curves[library] for library in LIBRARIES)
    assert len(theirs) == len(ours)
    assert abs(fmean(theirs) - fmean(ours)) < 0.12
