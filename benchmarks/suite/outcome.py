"""Outcome of a case: the merged metrics of its rounds and its success criteria. Pure functions."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.suite import criteria
from benchmarks.suite.cases import SYNC, Case, Work

# over several rounds, the maximum of these counts instead of the median
WORST = ("staleness_max", "longest_gap_s", "memory_peak_bytes", "dropped")


def merge_rounds(case: Case, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the rounds of a case; it failed if one round failed."""
    found: dict[str, Any] = {
        name: getattr(case, name) for name in ("sweep", "name", "settings", "comparable")
    } | {"checks": []}
    if case.skip:
        return found | {"state": "skipped", "reason": case.skip}
    for state in ("failed", "skipped"):
        reason = next((one["reason"] for one in rounds if one["state"] == state), None)
        if reason and (state == "failed" or all(one["state"] == state for one in rounds)):
            return found | {"state": state, "reason": reason}
    rounds = [one for one in rounds if one["state"] == "ok"]
    metrics = {
        name: statistics.median(one["metrics"][name] for one in rounds)
        for name in rounds[0]["metrics"]
        if not name.startswith("steady_")
    }
    metrics |= {name: max(one["metrics"][name] for one in rounds) for name in WORST}
    polls = {
        name: [poll for one in rounds for poll in one["memory"][name]] or [0.0]
        for name in ("gpu", "gpu_utilization")
    }
    metrics |= {
        "gpu_memory_bytes": max(polls["gpu"]),
        "gpu_utilization": statistics.fmean(polls["gpu_utilization"]),
    }
    return found | {
        "state": "ok",
        "metrics": metrics,
        "rounds": [one["metrics"]["samples_per_s"] for one in rounds],
        "memory": [one["memory"] for one in rounds],
        "pause": next((one["pause"] for one in rounds if one["pause"]), None),
    }


def check_case(case: dict[str, Any], work: Work) -> list[criteria.CheckResult]:
    """Check the criteria that concern one case alone."""
    metrics = case["metrics"]
    checks = [
        criteria.staleness(
            metrics["staleness_mean"], metrics["staleness_max"], int(metrics["max_staleness"])
        ),
        criteria.no_deadlock(
            int(metrics["steps"]),
            int(metrics["steps_planned"]),
            metrics["longest_gap_s"],
            work.limit_s / 2,
        ),
        *(
            criteria.memory_growth(series[where])
            for series in case["memory"]
            for where in ("host", "gpu")
            if any(series[where])
        ),
    ]
    if metrics["max_staleness"] > 0 and not case["pause"]:
        checks.append(
            criteria.queue_utilization(
                metrics["queue_utilization"],
                max_queue_size=int(metrics["max_queue_size"]),
                capacity=int(metrics["capacity"]),
                waiting=metrics["trainer_waits"],
            )
        )
    if pause := case["pause"]:
        ok = pause["paused"] and pause["effective"] and pause["resumed"] and pause["tokens"] == 0
        observed = (
            f"reply after {pause['pause_s']:.2f} s, "
            f"{pause['tokens']} tokens in {pause['watched_s']:.1f} s of pause, "
            f"new tokens {pause['resume_s']:.1f} s after resume"
        )
        checks.append(criteria.CheckResult("pause and resume", ok, observed))
    return checks


def check_rate(
    cases: Sequence[dict[str, Any]], target: float | None
) -> criteria.CheckResult | None:
    """Compare the best case with the user's target or with hybrid sync on the same machine."""
    best, base = criteria.best(cases), criteria.fastest(cases, SYNC)
    expected = target or (base["metrics"]["samples_per_s"] if base else None)
    if best is None or expected is None:
        return None
    source = "TARGET_SAMPLES_PER_S" if target else "hybrid sync on this machine"
    return criteria.generation_rate(
        best["metrics"]["samples_per_s"], expected, source, required=target is not None
    )
