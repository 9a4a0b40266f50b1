"""The success criteria of the end-to-end test and the benchmark, as pure functions of metrics.

Each function returns a CheckResult with the observed values and, if the check fails, advice. A
failed required check fails the command. The other checks only advise: queue utilization, and the
generation rate if the user sets no target.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MB = 1 << 20
QUEUE_LOW, QUEUE_HIGH = 0.5, 0.8
# allocators and log files vary by less than this; a leak exceeds both in time
GROWTH_FRACTION, GROWTH_BYTES = 0.05, 64 * MB
# two rates that differ by less count as equal: this is the noise between runs of equal settings
NOISE = 0.97
# memory polls, two per second; in a shorter run, a buffer that happens to grow looks like a leak
MIN_POLLS = 24
TOO_SHORT = "run too short to tell"
WARM = 0.5  # fraction of a run after which every buffer has held its largest batch


@dataclass(frozen=True, slots=True)
class CheckResult:
    criterion: str
    ok: bool
    observed: str
    advice: str = ""
    required: bool = True

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL" if self.required else "note"
        return f"{mark}  {self.criterion}: {self.observed}" + (
            f". {self.advice}" if self.advice else ""
        )


def generation_rate(
    samples_per_s: float, target: float, target_source: str, required: bool
) -> CheckResult:
    ok = samples_per_s >= NOISE * target
    return CheckResult(
        "generation rate above target",
        ok,
        f"{samples_per_s:.1f} samples/s, target {target:.1f} ({target_source})",
        ""
        if ok
        else "to generate faster, increase placement.rollout_workers, rollout.slots "
        "or schedule.max_staleness",
        required,
    )


def queue_utilization(
    mean: float, *, max_queue_size: int, capacity: int, waiting: float
) -> CheckResult:
    """Check the mean utilization of the queue.

    `capacity` is the maximum number of groups in flight, `waiting` the fraction of its time that
    the trainer waits for a batch.
    """
    observed = f"{mean:.0%} of {max_queue_size} groups"
    ok = QUEUE_LOW <= mean <= QUEUE_HIGH
    if ok:
        advice = ""
    elif mean > QUEUE_HIGH:
        advice = (
            "samples wait for the trainer and become stale: assign more devices to training, "
            "or lower schedule.max_staleness, which costs no speed here"
        )
    elif max_queue_size > capacity:
        advice = (
            f"admission allows {capacity} groups in flight, which fill {max_queue_size} slots to "
            f"{capacity / max_queue_size:.0%} at most: harmless, no change needed"
        )
    elif waiting > 0.1:
        advice = (
            f"the trainer waits {waiting:.0%} of its time: assign more devices to generation, "
            "or raise schedule.max_staleness"
        )
    else:
        advice = "samples are trained at once and the trainer rarely waits: no change needed"
    return CheckResult("queue utilization 50–80 %", ok, observed, advice, required=False)


def staleness(mean: float, highest: float, bound: int) -> CheckResult:
    ok = 0 <= mean <= highest <= bound
    return CheckResult(
        "staleness within bound",
        ok,
        f"mean {mean:.2f}, at most {highest:.0f}, bound {bound}",
        "" if ok else "this is a bug in Paceline: please report it",
    )


def memory_growth(series: Sequence[float]) -> CheckResult:
    """Compare the memory of the third and the last quarter of a run.

    `series` has the bytes of all processes of the run, at equal intervals.
    """
    name = "no memory growth"
    if len(series) < MIN_POLLS:
        return CheckResult(name, True, f"{TOO_SHORT} ({len(series)} polls)", required=False)
    steady = series[int(len(series) * WARM) :]
    before, after = (
        statistics.median(part) for part in (steady[: len(steady) // 2], steady[len(steady) // 2 :])
    )
    allowed = max(GROWTH_FRACTION * before, GROWTH_BYTES)
    ok = after - before <= allowed
    advice = "" if ok else f"grew by more than {allowed / MB:.0f} MB in a quarter of the run"
    return CheckResult(name, ok, f"{before / MB:,.0f} MB, then {after / MB:,.0f} MB", advice)


def no_deadlock(steps: int, planned: int, longest_gap_s: float, limit_s: float) -> CheckResult:
    ok = steps == planned and longest_gap_s < limit_s
    observed = f"{steps} of {planned} steps, at most {longest_gap_s:.1f} s between two"
    advice = "" if ok else "the log of the case lists what each task was waiting for"
    return CheckResult("no deadlock", ok, observed, advice)


def ledger(
    events: Iterable[Mapping[str, Any]], counts: Mapping[str, Any], trained: int
) -> CheckResult:
    """Compare the events of the ledger file with the counts of the run's summary.

    `trained` is the number of groups that the steps consumed.
    """
    times: dict[str, Counter[int]] = {
        "issued": Counter(),
        "trained": Counter(),
        "dropped": Counter(),
    }
    for event in events:
        if event["event"] in times:
            times[event["event"]][event["seq"]] += 1
    issued, done, dropped = (set(times[name]) for name in ("issued", "trained", "dropped"))
    outstanding = issued - done - dropped
    once = (
        all(count == 1 for counter in times.values() for count in counter.values())
        and not done & dropped
        and done | dropped <= issued
    )
    same = (len(issued), len(done), len(dropped), len(outstanding)) == (
        counts["issued"],
        counts["trained"],
        sum(counts["dropped"].values()),
        counts["outstanding"],
    )
    ok = once and same and len(done) == trained
    observed = (
        f"{len(issued)} issued = {len(done)} trained once + {len(dropped)} dropped "
        f"+ {len(outstanding)} outstanding"
    )
    advice = "" if ok else f"the summary has {dict(counts)}, and the steps consumed {trained}"
    return CheckResult("ledger balances", ok, observed, advice)


def fastest(cases: Sequence[Mapping[str, Any]], prefix: str) -> Mapping[str, Any] | None:
    """Return the fastest completed case whose name begins with `prefix`."""
    completed = [
        case for case in cases if case["state"] == "ok" and case["name"].startswith(prefix)
    ]
    return max(completed, key=lambda case: float(case["metrics"]["samples_per_s"]), default=None)


def best(cases: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the case with the freshest samples among those as fast as the fastest.

    Only cases that did the same work and passed every required check count.
    """
    eligible = [
        case
        for case in cases
        if case["state"] == "ok"
        and case["comparable"]
        and all(check["ok"] or not check["required"] for check in case["checks"])
    ]
    if not eligible:
        return None
    highest = max(case["metrics"]["samples_per_s"] for case in eligible)
    fast = [case for case in eligible if case["metrics"]["samples_per_s"] >= NOISE * highest]
    return min(
        fast, key=lambda case: (case["metrics"]["staleness_mean"], case["metrics"]["sample_age_s"])
    )
