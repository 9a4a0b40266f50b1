"""From the rounds of a case to what the report says of it, and how it is judged. Pure functions."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.suite import criteria
from benchmarks.suite.cases import SYNC, Case, Work

WORST = (
    "staleness_max",
    "longest_gap_s",
    "memory_peak_bytes",
    "dropped",
)  # of several rounds the most, not the median


def merged(case: Case, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A case as the report has it: medians over its rounds; it failed if one of them did."""
    found: dict[str, Any] = {
        name: getattr(case, name) for name in ("sweep", "name", "settings", "comparable")
    } | {"verdicts": []}
    if case.skip:
        return found | {"state": "skipped", "reason": case.skip}
    for state in ("failed", "skipped"):
        reason = next((one["reason"] for one in rounds if one["state"] == state), None)
        if reason and (state == "failed" or all(one["state"] == state for one in rounds)):
            return found | {"state": state, "reason": reason}
    rounds = [one for one in rounds if one["state"] == "ok"]
    names = rounds[0]["figures"]
    figures = {
        name: statistics.median(one["figures"][name] for one in rounds)
        for name in names
        if not name.startswith("steady_")
    }
    figures |= {name: max(one["figures"][name] for one in rounds) for name in WORST}
    looks = {
        name: [look for one in rounds for look in one["memory"][name]] or [0.0]
        for name in ("gpu", "gpu_use")
    }
    figures |= {
        "gpu_memory_bytes": max(looks["gpu"]),
        "gpu_use": statistics.fmean(looks["gpu_use"]),
    }
    return found | {
        "state": "ok",
        "figures": figures,
        "rounds": [one["figures"]["samples_per_s"] for one in rounds],
        "memory": [one["memory"] for one in rounds],
        "pause": next((one["pause"] for one in rounds if one["pause"]), None),
    }


def judge(case: dict[str, Any], work: Work) -> list[criteria.Verdict]:
    """The criteria that concern one case alone."""
    figures = case["figures"]
    verdicts = [
        criteria.staleness(
            figures["staleness_mean"], figures["staleness_max"], int(figures["max_staleness"])
        ),
        criteria.no_deadlock(
            int(figures["steps"]),
            int(figures["steps_wanted"]),
            figures["longest_gap_s"],
            work.limit_s / 2,
        ),
        *(
            criteria.memory_growth(series[where])
            for series in case["memory"]
            for where in ("host", "gpu")
            if any(series[where])
        ),
    ]
    if figures["max_staleness"] > 0 and not case["pause"]:
        use = criteria.queue_use(
            figures["queue_use"],
            max_queue_size=int(figures["max_queue_size"]),
            capacity=int(figures["capacity"]),
            waiting=figures["trainer_waits"],
        )
        verdicts.append(use)
    if pause := case["pause"]:
        ok = pause["paused"] and pause["held"] and pause["resumed"] and pause["tokens"] == 0
        seen = f"answered in {pause['pause_s']:.2f} s, {pause['tokens']} tokens in {pause['watched_s']:.1f} s of pause"
        verdicts.append(
            criteria.Verdict(
                "pause and resume", ok, f"{seen}, new ones {pause['resume_s']:.1f} s after resume"
            )
        )
    return verdicts


def judge_rate(cases: Sequence[dict[str, Any]], target: float | None) -> criteria.Verdict | None:
    """Of the best setting: against the user's target, or against the synchronous mode of the same sweep."""
    best, base = criteria.best(cases), criteria.fastest(cases, SYNC)
    wanted = target or (base["figures"]["samples_per_s"] if base else None)
    if best is None or wanted is None:
        return None
    whose = "TARGET_SAMPLES_PER_S" if target else "what hybrid sync makes here"
    return criteria.generation_rate(
        best["figures"]["samples_per_s"], wanted, whose, hard=target is not None
    )
