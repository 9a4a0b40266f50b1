"""Runs whose engine has an FP8 KV cache and FP8 weights, on a CPU."""

from pathlib import Path

import pytest

from tests.e2e.test_runs import MODES
from tests.small_runs import SEPARATE, run, steps_of, weights

FP8 = ["rollout.kv_cache_dtype=fp8", "rollout.weight_dtype=fp8"]


@pytest.mark.slow
def test_fp8_run_is_the_same_in_every_placement(model: str, tmp_path: Path) -> None:
    placements = {"hybrid": [], "separate": SEPARATE, "overlap": ["placement.overlap=true"]}
    for name, settings in placements.items():
        run(model, tmp_path / name, *FP8, *settings)
    assert len({weights(tmp_path / name, 4) for name in placements}) == 1


@pytest.mark.parametrize("setting", FP8)
def test_fp8_run_reports_difference_of_engine_and_trainer(
    model: str, tmp_path: Path, setting: str
) -> None:
    run(model, tmp_path, setting)
    differences = [step["train/logprob_diff_mean"] for step in steps_of(tmp_path)]
    assert len(differences) == 4 and all(1e-5 < each < 0.3 for each in differences)


def test_fp8_run_keeps_up_when_generation_is_ahead(model: str, tmp_path: Path) -> None:
    summary = run(model, tmp_path, *FP8, *MODES["one device, overlapping"])
    assert summary["steps"] == 4 and not summary["ledger"]["dropped"]
