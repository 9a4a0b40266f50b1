"""Success criteria of the end-to-end test and the benchmark, and their advice."""

from typing import Any

import pytest

from benchmarks.suite import criteria
from benchmarks.suite.criteria import MB, CheckResult


def utilization(mean: float, **more: Any) -> CheckResult:
    return criteria.queue_utilization(
        mean, **({"max_queue_size": 64, "capacity": 64, "waiting": 0.0} | more)
    )


@pytest.mark.parametrize(
    ("mean", "ok"), [(0.49, False), (0.5, True), (0.65, True), (0.8, True), (0.81, False)]
)
def test_queue_utilization_holds_between_50_and_80_percent(mean: float, ok: bool) -> None:
    assert utilization(mean).ok is ok
    assert bool(utilization(mean).advice) is not ok


@pytest.mark.parametrize(
    ("mean", "more", "advice"),
    [
        (0.9, {}, "assign more devices to training"),
        (0.2, {"waiting": 0.4}, "assign more devices to generation"),
        (0.2, {"waiting": 0.0}, "the trainer rarely waits"),
        (0.05, {"max_queue_size": 1000}, "admission allows 64 groups in flight"),
    ],
)
def test_queue_utilization_advice_names_cause_when_out_of_range(
    mean: float, more: dict[str, Any], advice: str
) -> None:
    found = utilization(mean, **more)
    assert not found.ok and not found.required and advice in found.advice


def test_staleness_fails_when_sample_exceeds_bound() -> None:
    assert criteria.staleness(1.5, 3, bound=3).ok
    assert criteria.staleness(0, 0, bound=0).ok
    assert not criteria.staleness(1.5, 4, bound=3).ok


def test_memory_growth_fails_only_when_memory_keeps_growing() -> None:
    flat = [2000.0 * MB + (index % 3) * 10 * MB for index in range(40)]
    leak = [2000.0 * MB + index * 20 * MB for index in range(40)]
    warm_up = [100.0 * MB * min(index, 15) for index in range(40)]
    assert criteria.memory_growth(flat).ok and criteria.memory_growth(warm_up).ok
    assert not criteria.memory_growth(leak).ok
    assert criteria.TOO_SHORT in criteria.memory_growth(leak[:5]).observed


def test_no_deadlock_fails_when_steps_are_missing_or_far_apart() -> None:
    assert criteria.no_deadlock(10, 10, longest_gap_s=2, limit_s=30).ok
    assert not criteria.no_deadlock(9, 10, longest_gap_s=2, limit_s=30).ok
    assert not criteria.no_deadlock(10, 10, longest_gap_s=31, limit_s=30).ok


def test_generation_rate_fails_only_when_target_is_set_by_user() -> None:
    assert criteria.generation_rate(100, 50, "user", required=True).ok
    assert str(criteria.generation_rate(40, 50, "user", required=True)).startswith("FAIL")
    assert str(criteria.generation_rate(40, 50, "hybrid sync", required=False)).startswith("note")


EVENTS = [{"event": "issued", "seq": seq} for seq in range(5)]
EVENTS += [{"event": "trained", "seq": seq} for seq in (0, 1)] + [
    {"event": "dropped", "seq": 2},
    {"event": "reissued", "seq": 3},
]
COUNTS = {"issued": 5, "trained": 2, "dropped": {"stale": 1}, "outstanding": 2}


def test_ledger_balances_when_every_group_counts_once() -> None:
    found = criteria.ledger(EVENTS, COUNTS, trained=2)
    assert found.ok and found.observed == "5 issued = 2 trained once + 1 dropped + 2 outstanding"


@pytest.mark.parametrize(
    "events",
    [
        [*EVENTS, {"event": "trained", "seq": 1}],  # trained twice
        [*EVENTS, {"event": "trained", "seq": 2}],  # dropped and trained
        [*EVENTS, {"event": "trained", "seq": 7}],  # never issued
        EVENTS[:-2],  # the dropped event is missing
    ],
)
def test_ledger_fails_when_group_counts_twice_or_never(events: list[dict[str, Any]]) -> None:
    assert not criteria.ledger(events, COUNTS, trained=2).ok


def case(name: str, samples_per_s: float, staleness: float, **more: Any) -> dict[str, Any]:
    metrics = {"samples_per_s": samples_per_s, "staleness_mean": staleness, "sample_age_s": 1.0}
    return {
        "name": name,
        "state": "ok",
        "comparable": True,
        "checks": [],
        "metrics": metrics,
    } | more


def test_best_case_has_freshest_samples_among_fastest() -> None:
    cases = [case("sync", 60, 0.0), case("stale", 100, 5.0), case("fresh", 98, 1.0)]
    found = criteria.best(cases)
    assert found and found["name"] == "fresh"


def test_best_case_ignores_failed_and_incomparable_cases() -> None:
    failed_check = {"criterion": "staleness within bound", "ok": False, "required": True}
    excluded = [
        case("other work", 900, 0.0, comparable=False),
        case("check failed", 300, 0.0, checks=[failed_check]),
        case("failed", 900, 0.0, state="failed"),
    ]
    found = criteria.best([*excluded, case("slow", 1, 0.0)])
    assert found and found["name"] == "slow"
    assert criteria.best(excluded) is None
