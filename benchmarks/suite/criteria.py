"""The test guide's success criteria as pure functions: figures in, a verdict with what was seen out, and advice where it falls short.

A hard criterion fails the command; the others (rate of generation without a target of the user's, use of the queue) advise.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MB = 1 << 20
QUEUE_LOW, QUEUE_HIGH = 0.5, 0.8
GROWTH_SHARE, GROWTH_BYTES = (
    0.05,
    64 * MB,
)  # allocators and logs breathe; a leak goes past both in time
SLOWER = 0.97  # rates nearer than this are one rate: what noise there is between two runs of the same settings
LOOKS = (
    24  # at memory, two a second; in less time a buffer that happens to grow is taken for a leak
)
TOO_SHORT = "too short a run to tell"
WARM = 0.5  # of a run: by then every buffer has had its largest batch


@dataclass(frozen=True, slots=True)
class Verdict:
    criterion: str
    ok: bool
    seen: str
    advice: str = ""
    hard: bool = True

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL" if self.hard else "note"
        return f"{mark}  {self.criterion}: {self.seen}" + (
            f". {self.advice}" if self.advice else ""
        )


def generation_rate(samples_per_s: float, target: float, whose: str, hard: bool) -> Verdict:
    """`whose`: where the target comes from, in words."""
    ok = samples_per_s >= SLOWER * target
    advice = (
        ""
        if ok
        else "more engines (placement.rollout_workers), more slots (rollout.slots) or a higher max_staleness generate faster"
    )
    return Verdict(
        "generation rate above target",
        ok,
        f"{samples_per_s:.1f} samples/s, target {target:.1f} ({whose})",
        advice,
        hard,
    )


def queue_use(mean: float, *, max_queue_size: int, capacity: int, waiting: float) -> Verdict:
    """`capacity`: groups that may be under way at once; `waiting`: the trainer's share of time without a batch."""
    seen = f"{mean:.0%} of {max_queue_size} groups"
    if QUEUE_LOW <= mean <= QUEUE_HIGH:
        return Verdict("queue use 50–80 %", True, seen, hard=False)
    if mean > QUEUE_HIGH:
        advice = "samples wait for the trainer and grow old: give training more devices, or lower max_staleness, at no loss of speed"
    elif max_queue_size > capacity:
        advice = (
            f"admission lets {capacity} groups be under way, so {max_queue_size} can never be there: "
            f"the size does no harm; {capacity / max_queue_size:.0%} would be full"
        )
    elif waiting > 0.1:
        advice = f"the trainer waits {waiting:.0%} of its time: give generation more devices, or raise max_staleness"
    else:
        advice = "samples are trained as soon as they are made, and the trainer hardly waits: nothing to do"
    return Verdict("queue use 50–80 %", False, seen, advice, hard=False)


def staleness(mean: float, most: float, bound: int) -> Verdict:
    ok = 0 <= mean <= most <= bound
    return Verdict(
        "staleness as expected",
        ok,
        f"mean {mean:.2f}, at most {most:.0f}, bound {bound}",
        "" if ok else "a bug: please report it",
    )


def memory_growth(series: Sequence[float]) -> Verdict:
    """`series`: bytes of all processes of a run, evenly in time. Compared: the third and the last quarter."""
    name = "no growth of memory"
    if len(series) < LOOKS:
        return Verdict(name, True, f"{TOO_SHORT} ({len(series)} looks)", hard=False)
    steady = series[int(len(series) * WARM) :]
    before, after = (
        statistics.median(part) for part in (steady[: len(steady) // 2], steady[len(steady) // 2 :])
    )
    allowed = max(GROWTH_SHARE * before, GROWTH_BYTES)
    ok = after - before <= allowed
    advice = "" if ok else f"more than {allowed / MB:.0f} MB in a quarter of the run"
    return Verdict(name, ok, f"{before / MB:,.0f} MB, then {after / MB:,.0f} MB", advice)


def no_deadlock(steps: int, wanted: int, longest_gap_s: float, limit_s: float) -> Verdict:
    ok = steps == wanted and longest_gap_s < limit_s
    seen = f"{steps} of {wanted} steps, at most {longest_gap_s:.1f} s between two"
    return Verdict(
        "no deadlock", ok, seen, "" if ok else "the case's log names what was waited for"
    )


def ledger(events: Iterable[Mapping[str, Any]], counts: Mapping[str, Any], trained: int) -> Verdict:
    """Adds up the ledger file line by line and compares with what the run says; `trained`: groups that the steps must have consumed."""
    times: dict[str, Counter[int]] = {
        "issued": Counter(),
        "trained": Counter(),
        "dropped": Counter(),
    }
    for event in events:
        if event["event"] in times:
            times[event["event"]][event["seq"]] += 1
    issued, done, dropped = (set(times[name]) for name in ("issued", "trained", "dropped"))
    open_ = issued - done - dropped
    once = (
        all(count == 1 for counter in times.values() for count in counter.values())
        and not done & dropped
        and done | dropped <= issued
    )
    same = (len(issued), len(done), len(dropped)) == (
        counts["issued"],
        counts["trained"],
        sum(counts["dropped"].values()),
    )
    ok = once and same and len(done) == trained and len(open_) == counts["outstanding"]
    seen = f"{len(issued)} issued = {len(done)} trained once + {len(dropped)} dropped + {len(open_)} still out"
    return Verdict(
        "ledger adds up",
        ok,
        seen,
        "" if ok else f"the run says {dict(counts)}, and the steps consumed {trained}",
    )


def fastest(cases: Sequence[Mapping[str, Any]], prefix: str) -> Mapping[str, Any] | None:
    """Of the cases whose names begin so."""
    able = [case for case in cases if case["state"] == "ok" and case["name"].startswith(prefix)]
    return max(able, key=lambda case: float(case["figures"]["samples_per_s"]), default=None)


def best(cases: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The setting to take: of those as fast as the fastest, the one with the freshest samples. Only cases that did the same work."""
    able = [
        case
        for case in cases
        if case["state"] == "ok"
        and case["comparable"]
        and all(v["ok"] or not v["hard"] for v in case["verdicts"])
    ]
    if not able:
        return None
    most = max(case["figures"]["samples_per_s"] for case in able)
    near = [case for case in able if case["figures"]["samples_per_s"] >= SLOWER * most]
    return min(
        near, key=lambda case: (case["figures"]["staleness_mean"], case["figures"]["sample_age_s"])
    )
