"""The test guide's success criteria: each says yes and no where it should, and advises what helps."""

from typing import Any

import pytest

from benchmarks.suite import criteria
from benchmarks.suite.criteria import MB, Verdict


def use(mean: float, **more: Any) -> Verdict:
    return criteria.queue_use(
        mean, **({"max_queue_size": 64, "capacity": 64, "waiting": 0.0} | more)
    )


@pytest.mark.parametrize(
    ("mean", "ok"), [(0.49, False), (0.5, True), (0.65, True), (0.8, True), (0.81, False)]
)
def test_a_queue_is_used_well_between_half_and_four_fifths(mean: float, ok: bool) -> None:
    assert use(mean).ok is ok
    assert bool(use(mean).advice) is not ok


@pytest.mark.parametrize(
    ("mean", "more", "advice"),
    [
        (0.9, {}, "give training more devices"),
        (0.2, {"waiting": 0.4}, "give generation more devices"),
        (0.2, {"waiting": 0.0}, "nothing to do"),
        (0.05, {"max_queue_size": 1000}, "admission lets 64 groups be under way"),
    ],
)
def test_outside_of_it_the_advice_fits_the_cause(
    mean: float, more: dict[str, Any], advice: str
) -> None:
    found = use(mean, **more)
    assert not found.ok and not found.hard and advice in found.advice


def test_samples_beyond_the_bound_fail() -> None:
    assert criteria.staleness(1.5, 3, bound=3).ok
    assert criteria.staleness(0, 0, bound=0).ok
    assert not criteria.staleness(1.5, 4, bound=3).ok


def test_memory_that_grows_is_seen_and_memory_that_breathes_is_not() -> None:
    flat = [2000.0 * MB + (index % 3) * 10 * MB for index in range(40)]
    leak = [2000.0 * MB + index * 20 * MB for index in range(40)]
    warm_up = [100.0 * MB * min(index, 15) for index in range(40)]
    assert criteria.memory_growth(flat).ok and criteria.memory_growth(warm_up).ok
    assert not criteria.memory_growth(leak).ok
    assert "too short" in criteria.memory_growth(leak[:5]).seen


def test_a_run_that_stood_still_or_stopped_early_is_a_deadlock() -> None:
    assert criteria.no_deadlock(10, 10, longest_gap_s=2, limit_s=30).ok
    assert not criteria.no_deadlock(9, 10, longest_gap_s=2, limit_s=30).ok
    assert not criteria.no_deadlock(10, 10, longest_gap_s=31, limit_s=30).ok


def test_a_target_of_the_users_fails_the_benchmark_and_ours_advises() -> None:
    assert criteria.generation_rate(100, 50, "yours", hard=True).ok
    assert str(criteria.generation_rate(40, 50, "yours", hard=True)).startswith("FAIL")
    assert str(criteria.generation_rate(40, 50, "hybrid sync", hard=False)).startswith("note")


EVENTS = [{"event": "issued", "seq": seq} for seq in range(5)]
EVENTS += [{"event": "trained", "seq": seq} for seq in (0, 1)] + [
    {"event": "dropped", "seq": 2},
    {"event": "reissued", "seq": 3},
]
COUNTS = {"issued": 5, "trained": 2, "dropped": {"stale": 1}, "outstanding": 2}


def test_a_ledger_adds_up_line_by_line() -> None:
    found = criteria.ledger(EVENTS, COUNTS, trained=2)
    assert found.ok and found.seen == "5 issued = 2 trained once + 1 dropped + 2 still out"


@pytest.mark.parametrize(
    "wrong",
    [
        [*EVENTS, {"event": "trained", "seq": 1}],  # trained twice
        [*EVENTS, {"event": "trained", "seq": 2}],  # dropped and trained
        [*EVENTS, {"event": "trained", "seq": 7}],  # never issued
        EVENTS[:-2],  # the drop is missing
    ],
)
def test_and_not_when_a_group_counts_twice_or_never(wrong: list[dict[str, Any]]) -> None:
    assert not criteria.ledger(wrong, COUNTS, trained=2).ok


def case(name: str, samples_per_s: float, staleness: float, **more: Any) -> dict[str, Any]:
    figures = {"samples_per_s": samples_per_s, "staleness_mean": staleness, "sample_age_s": 1.0}
    return {
        "name": name,
        "state": "ok",
        "comparable": True,
        "verdicts": [],
        "figures": figures,
    } | more


def test_the_best_setting_is_the_freshest_of_the_fastest_that_did_the_same_work_and_met_the_criteria() -> (
    None
):
    broken = {
        "criterion": "staleness as expected",
        "ok": False,
        "seen": "",
        "advice": "",
        "hard": True,
    }
    cases = [
        case("sync", 60, 0.0),
        case("stale", 100, 5.0),
        case("fresh", 98, 1.0),
        case("other work", 900, 0.0, comparable=False),
        case("broken", 300, 0.0, verdicts=[broken]),
        case("failed", 900, 0.0, state="failed"),
    ]
    found = criteria.best(cases)
    assert found and found["name"] == "fresh"
    assert criteria.best(cases[-2:]) is None
