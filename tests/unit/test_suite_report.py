"""Report, summary and plots of the benchmark, made from invented metrics."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import report
from benchmarks.suite.cases import QUICK, Case, all_cases
from benchmarks.suite.choice import Choice
from benchmarks.suite.outcome import check_case, check_rate, merge_rounds

METRICS = {
    "samples_per_s": 100.0,
    "tokens_per_s": 3000.0,
    "steps_per_s": 1.5,
    "sample_age_s": 0.8,
    "staleness_mean": 0.0,
    "staleness_max": 0,
    "sync_ms": 4.0,
    "rollout_busy": 0.7,
    "train_busy": 0.6,
    "queue_utilization": 0.6,
    "memory_peak_bytes": 1 << 30,
    "dropped": 0.0,
    "steps": 18,
    "steps_planned": 18,
    "longest_gap_s": 1.0,
    "max_queue_size": 32,
    "capacity": 32,
    "max_staleness": 3,
    "in_place": False,
    "trainer_trains": 0.6,
    "trainer_waits": 0.3,
    "trainer_syncs": 0.05,
    "trainer_other": 0.05,
    "rollout_generates": 0.7,
    "rollout_paused": 0.0,
    "rollout_idle": 0.3,
}
PAUSE = {
    "paused": True,
    "pause_s": 0.01,
    "effective": True,
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
        "gpu_utilization": [0.0] * 12,
    }
    return {
        "state": "ok",
        "metrics": METRICS | {"steady_from_s": 0.0, "steady_to_s": 6.0} | more,
        "memory": memory,
        "pause": PAUSE if case.pause else None,
        "seconds": 9.0,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """All cases without GPUs: `queue 1000` failed, some are skipped, async is the fastest."""
    rates = {
        "hybrid sync": 60.0,
        "hybrid sync, one thread": 50.0,
        "staleness 1": 99.0,
        "staleness 3": 100.0,
    }
    cases = []
    for case in all_cases(Choice(), QUICK):
        rate = rates.get(case.name, 80.0)
        one = round_of(
            case,
            samples_per_s=rate,
            staleness_mean=1.0 if rate == 99 else 2.0,
            staleness_max=3,
        )
        if case.name == "queue 1000":
            one = {"state": "failed", "reason": "StalledError: no progress", "seconds": 9.0}
        found = merge_rounds(case, [one])
        if found["state"] == "ok":
            found["checks"] = [asdict(check) for check in check_case(found, QUICK)]
        cases.append(found)
    rate_check = check_rate(cases, None)
    assert rate_check and rate_check.ok
    return {
        "command": "./run_benchmark.sh --quick",
        "date": "2026-11-15",
        "choice": "CPU only",
        "machine": "2 cores",
        "versions": {"torch": "2"},
        "work": {"steps": 18, "batch": 8, "warm_up": 5, "median": 24, "cap": 192, "rounds": 1},
        "minutes": 4.0,
        "cases": cases,
        "rate": asdict(rate_check),
    }


def check(
    ok: bool = True, observed: str = "8 MB, then 8 MB", required: bool = True
) -> dict[str, Any]:
    return {
        "criterion": "no memory growth",
        "ok": ok,
        "observed": observed,
        "advice": "",
        "required": required,
    }


def test_report_has_every_sweep_and_best_setting(results: dict[str, Any]) -> None:
    text = report.report(results, {"Samples per second": "rate.svg"})
    for title in report.SWEEPS.values():
        assert f"## {title}" in text
    assert "**staleness 1**" in text and "1.65× hybrid sync" in text
    assert "![Samples per second](rate.svg)" in text
    assert "generation rate above target | yes" in text
    assert "pause, swap: pause returned True after 10 ms, 0 tokens in 2.0 s of pause" in text


def test_report_gives_reason_when_case_failed_or_was_skipped(results: dict[str, Any]) -> None:
    text = report.report(results, {})
    assert "queue 1000 failed: StalledError: no progress" in text
    assert "megatron skipped: needs GPUs and megatron-core" in text


def test_report_shows_gpu_columns_only_when_gpus_are_used(results: dict[str, Any]) -> None:
    assert "GPU utilization" not in report.report(results, {})
    case = Case("mode", "hybrid sync", ())
    on_gpu = round_of(case)
    on_gpu["memory"] |= {"gpu": [3 << 30, 2 << 30], "gpu_utilization": [0.5, 0.7]}
    text = report.report(results | {"cases": [merge_rounds(case, [on_gpu])]}, {})
    assert "GPU utilization | GPU memory, MB |" in text and "60% | 3,072 |" in text


def test_summary_has_one_line_per_case(results: dict[str, Any]) -> None:
    lines = report.summary(results).splitlines()
    assert all(any(line.startswith(case["name"]) for line in lines) for case in results["cases"])
    assert lines[-1].startswith("best: **staleness 1**")


SUCCESS = "every planned case completed and every criterion holds"


@pytest.fixture
def passed(results: dict[str, Any]) -> dict[str, Any]:
    """Return the completed cases only, with one passed check each and no rate check."""
    completed = [case for case in results["cases"] if case["state"] == "ok"]
    return results | {"rate": None, "cases": [case | {"checks": [check()]} for case in completed]}


def test_summary_reports_success_when_every_case_and_check_passed(passed: dict[str, Any]) -> None:
    count = len(passed["cases"])
    lines = report.summary(passed).splitlines()
    assert f"cases: {count} planned, {count} completed, 0 failed, 0 skipped" in lines
    assert f"checks: {count} made, {count} passed, 0 failed, 0 with advice only" in lines
    assert SUCCESS in lines
    assert f"- {SUCCESS}" in report.report(passed, {}).splitlines()


@pytest.mark.parametrize(
    ("state", "counts"), [("failed", "1 failed, 0 skipped"), ("skipped", "0 failed, 1 skipped")]
)
def test_summary_counts_case_without_claiming_success_when_not_completed(
    passed: dict[str, Any], state: str, counts: str
) -> None:
    count = len(passed["cases"])
    passed["cases"][-1] = passed["cases"][-1] | {"state": state, "reason": "no", "checks": []}
    text = report.summary(passed)
    assert f"cases: {count} planned, {count - 1} completed, {counts}\n" in text
    assert SUCCESS not in text and SUCCESS not in report.report(passed, {})


@pytest.mark.parametrize(
    ("result", "counts"),
    [
        (check(ok=False), "{passed} passed, 1 failed, 0 with advice only"),
        (check(ok=False, required=False), "{passed} passed, 0 failed, 1 with advice only"),
        (
            check(observed="run too short to tell (3 polls)"),
            "{passed} passed, 0 failed, 0 with advice only; 1 not made: run too short to tell",
        ),
    ],
)
def test_summary_counts_check_without_claiming_success_when_not_passed(
    passed: dict[str, Any], result: dict[str, Any], counts: str
) -> None:
    passed["cases"][0]["checks"].append(result)
    text = report.summary(passed)
    assert counts.format(passed=len(passed["cases"])) + "\n" in text
    assert SUCCESS not in text and SUCCESS not in report.report(passed, {})


def test_summary_does_not_claim_success_when_no_case_was_planned(passed: dict[str, Any]) -> None:
    text = report.summary(passed | {"cases": []})
    assert "cases: 0 planned" in text and SUCCESS not in text


def test_merged_case_has_median_of_rate_and_maximum_of_drops() -> None:
    case = Case("queue", "queue 8", ())
    rounds = [round_of(case, samples_per_s=rate, dropped=rate) for rate in (10.0, 30.0)]
    metrics = merge_rounds(case, rounds)["metrics"]
    assert metrics["samples_per_s"] == 20 and metrics["dropped"] == 30


def test_merged_case_fails_when_one_round_fails() -> None:
    case = Case("queue", "queue 8", ())
    failed = {"state": "failed", "reason": "no"}
    assert merge_rounds(case, [round_of(case), failed])["state"] == "failed"


def test_merged_case_is_skipped_only_when_every_round_is_skipped() -> None:
    case = Case("queue", "queue 8", ())
    late = {"state": "skipped", "reason": "budget used up"}
    assert merge_rounds(case, [round_of(case), late])["state"] == "ok"
    assert merge_rounds(case, [late])["reason"] == "budget used up"


def test_plots_are_written_next_to_report(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.suite.plots import draw_plots

    files = draw_plots(results, tmp_path)
    assert len(files) == 5
    assert all((tmp_path / file).stat().st_size > 1000 for file in files.values())


def test_criteria_table_counts_case_once_when_checked_several_times(
    results: dict[str, Any],
) -> None:
    checks = [
        [check(), check()],
        [check(), check(ok=False)],
        [check(observed="run too short to tell (3 polls)")],
        [],
    ]
    results["cases"] = [
        case | {"checks": found} for case, found in zip(results["cases"][:4], checks, strict=True)
    ]
    assert "| no memory growth | 1 of 2 cases; 1 run too short to tell |" in report.report(
        results, {}
    )
