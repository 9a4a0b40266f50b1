"""The benchmark's report and plots from made-up figures: every sweep has its table, failures and skips are told, advice is given."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import report
from benchmarks.suite.cases import QUICK, Case, all_cases
from benchmarks.suite.choice import Choice
from benchmarks.suite.outcome import judge, judge_rate, merged

FIGURES = {
    "samples_per_s": 100.0,
    "tokens_per_s": 3000.0,
    "steps_per_s": 1.5,
    "sample_age_s": 0.8,
    "staleness_mean": 0.0,
    "staleness_max": 0,
    "sync_ms": 4.0,
    "rollout_busy": 0.7,
    "train_busy": 0.6,
    "queue_use": 0.6,
    "memory_peak_bytes": 1 << 30,
    "dropped": 0.0,
    "steps": 18,
    "steps_wanted": 18,
    "longest_gap_s": 1.0,
    "max_queue_size": 32,
    "capacity": 32,
    "max_staleness": 3,
    "in_place": False,
    "trainer_trains": 0.6,
    "trainer_waits": 0.3,
    "trainer_hands_over": 0.05,
    "trainer_else": 0.05,
    "rollout_generates": 0.7,
    "rollout_held": 0.0,
    "rollout_idle": 0.3,
}
PAUSE = {
    "paused": True,
    "pause_s": 0.01,
    "held": True,
    "tokens": 0,
    "watched_s": 2.0,
    "resumed": True,
    "resume_s": 0.9,
}


def round_of(case: Case, **more: float) -> dict[str, Any]:
    memory = {
        "seconds": [0.5 * index for index in range(12)],
        "host": [1e9] * 12,
        "gpu": [0] * 12,
        "gpu_use": [0.0] * 12,
    }
    figures = FIGURES | {"steady_from_s": 0.0, "steady_to_s": 6.0} | more
    return {
        "state": "ok",
        "figures": figures,
        "memory": memory,
        "pause": PAUSE if case.pause else None,
        "seconds": 9.0,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """All cases of the quick benchmark; one failed, one cannot run here, and async is faster than sync."""
    cases = []
    for case in all_cases(Choice(), QUICK):
        rate = {
            "hybrid sync": 60.0,
            "hybrid sync, one thread": 50.0,
            "staleness 1": 99.0,
            "staleness 3": 100.0,
        }.get(case.name, 80.0)
        found = merged(
            case,
            [
                round_of(
                    case,
                    samples_per_s=rate,
                    staleness_mean=1.0 if rate == 99 else 2.0,
                    staleness_max=3,
                )
            ],
        )
        if case.name == "queue 1000":
            found = merged(
                case, [{"state": "failed", "reason": "StalledError: nothing moved", "seconds": 9.0}]
            )
        if found["state"] == "ok":
            found["verdicts"] = [
                {
                    "criterion": v.criterion,
                    "ok": v.ok,
                    "seen": v.seen,
                    "advice": v.advice,
                    "hard": v.hard,
                }
                for v in judge(found, QUICK)
            ]
        cases.append(found)
    rate = judge_rate(cases, None)
    assert rate and rate.ok
    work = {"steps": 18, "batch": 8, "warm_up": 5, "median": 24, "cap": 192, "rounds": 1}
    return {
        "command": "./run_benchmark.sh --quick",
        "choice": "CPU only",
        "machine": "2 cores",
        "versions": {"torch": "2"},
        "work": work,
        "minutes": 4.0,
        "cases": cases,
        "rate": {
            "criterion": rate.criterion,
            "ok": rate.ok,
            "seen": rate.seen,
            "advice": rate.advice,
            "hard": rate.hard,
        },
    }


def test_the_report_has_every_sweep_the_best_setting_and_what_failed(
    results: dict[str, Any],
) -> None:
    text = report.report(results, {"Samples per second": "rate.svg"})
    for title in report.SWEEPS.values():
        assert f"## {title}" in text
    assert "**staleness 1**" in text and "1.65× hybrid sync" in text
    assert "queue 1000 failed: StalledError: nothing moved" in text
    assert (
        "![Samples per second](rate.svg)" in text and "generation rate above target | yes" in text
    )
    assert "pause, swap: pause answered True in 10 ms, 0 tokens in 2.0 s of pause" in text


def test_the_memory_and_use_that_gpus_report_are_shown_where_there_are_gpus(
    results: dict[str, Any],
) -> None:
    assert "GPU use" not in report.report(results, {})
    case = Case("mode", "hybrid sync", ())
    on_gpu = round_of(case)
    on_gpu["memory"] |= {"gpu": [3 << 30, 2 << 30], "gpu_use": [0.5, 0.7]}
    text = report.report(results | {"cases": [merged(case, [on_gpu])]}, {})
    assert "GPU use | GPU memory, MB |" in text and "60% | 3,072 |" in text


def test_a_case_that_cannot_run_here_is_told_with_its_reason(results: dict[str, Any]) -> None:
    assert "megatron skipped: needs GPUs and megatron-core" in report.report(results, {})


def test_the_summary_has_a_line_per_case(results: dict[str, Any]) -> None:
    lines = report.summary(results).splitlines()
    assert all(any(line.startswith(case["name"]) for line in lines) for case in results["cases"])
    assert lines[-1].startswith("best: **staleness 1**")


def test_a_case_fails_when_one_of_its_rounds_does_and_else_has_their_median() -> None:
    case = Case("queue", "queue 8", ())
    rounds = [round_of(case, samples_per_s=rate, dropped=rate) for rate in (10.0, 30.0)]
    assert (
        merged(case, rounds)["figures"]["samples_per_s"] == 20
        and merged(case, rounds)["figures"]["dropped"] == 30
    )
    assert merged(case, [*rounds, {"state": "failed", "reason": "no"}])["state"] == "failed"
    late = {"state": "skipped", "reason": "the time was up"}
    assert (
        merged(case, [*rounds, late])["state"] == "ok"
        and merged(case, [late])["reason"] == "the time was up"
    )


def test_plots_are_files_beside_the_report(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.suite.plots import draw

    drawn = draw(results, tmp_path)
    assert len(drawn) == 5 and all(
        (tmp_path / file).stat().st_size > 1000 for file in drawn.values()
    )


def test_a_case_counts_once_for_a_criterion_however_often_it_was_judged(
    results: dict[str, Any],
) -> None:
    def verdict(ok: bool, seen: str = "8 MB, then 8 MB") -> dict[str, Any]:
        return {
            "criterion": "no growth of memory",
            "ok": ok,
            "seen": seen,
            "advice": "",
            "hard": True,
        }

    judged = [
        [verdict(True), verdict(True)],
        [verdict(True), verdict(False)],
        [verdict(True, "too short a run to tell (3 looks)")],
        [],
    ]
    results["cases"] = [
        case | {"verdicts": verdicts}
        for case, verdicts in zip(results["cases"][:4], judged, strict=True)
    ]
    assert "| no growth of memory | 1 of 2 cases; 1 too short a run to tell |" in report.report(
        results, {}
    )
