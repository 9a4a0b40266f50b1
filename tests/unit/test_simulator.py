"""The simulator against theory: known costs, so known times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError
from paceline.schedule import ScheduleSettings
from paceline.simulator.costs import CostModel, read_costs, write_costs
from paceline.simulator.fit import fit_decode, fit_line, fit_prefill, fit_train
from paceline.simulator.lengths import read_distribution
from paceline.simulator.limit import limit_steps_per_s
from paceline.simulator.modes import HYBRID, Comparison, compare_modes
from paceline.simulator.probe import above_zero, slowdowns
from paceline.simulator.simulation import Outcome, Scenario, simulate
from paceline.types import OnSync

FREE = CostModel(
    decode_step_s=0.0,
    decode_sequence_s=0.0,
    decode_context_s=0.0,
    prefill_token_s=0.0,
    train_step_s=0.0,
    train_token_s=0.0,
    load_s=0.0,
)
# 16 groups x 8 completions x 50 tokens: generation takes 5 s, training 2 s.
PLAIN = FREE.model_copy(update={"decode_step_s": 0.1, "train_step_s": 2.0})
SCENARIO = Scenario(PLAIN, read_distribution("fixed:50"), ScheduleSettings(), steps=10)
AHEAD = ScheduleSettings(max_staleness=3, on_sync=OnSync.SWAP)
SCHEDULES = [
    ScheduleSettings(),
    ScheduleSettings(max_staleness=1),
    AHEAD,
    ScheduleSettings(max_staleness=2, on_sync=OnSync.INTERRUPT),
    ScheduleSettings(max_staleness=3, sync_every=2, on_sync=OnSync.SWAP),
]
LONG_TAIL = read_distribution("lognormal:50,1.0").tokens(2000)


def priced(**costs: Any) -> CostModel:
    return FREE.model_copy(update=costs)


# --- costs ---


@pytest.mark.parametrize("context_s", [0.0, 1e-7, 1e-4])
def test_burst_is_sum_of_its_steps(context_s: float) -> None:
    costs = priced(decode_step_s=1e-3, decode_sequence_s=1e-5, decode_context_s=context_s)
    steps = sum(costs.burst_s(1, 7, 900 + 7 * step) for step in range(50))
    assert costs.burst_s(50, 7, 900) == pytest.approx(steps)


@pytest.mark.parametrize("context_s", [0.0, 1e-7, 1e-4])
def test_steps_within_inverts_burst(context_s: float) -> None:
    costs = priced(decode_step_s=1e-3, decode_sequence_s=1e-5, decode_context_s=context_s)
    for steps in (1, 2, 17, 400):
        assert costs.steps_within(costs.burst_s(steps, 7, 900) * (1 - 1e-9), 7, 900) == steps
        assert costs.steps_within(costs.burst_s(steps, 7, 900) * (1 + 1e-9), 7, 900) == steps + 1


def test_decode_step_is_interpolated_between_measured_points() -> None:
    costs = priced(decode_points=((1, 0.5), (16, 0.8), (33, 1.2)), decode_context_s=0.001)
    steps = [costs.burst_s(1, n, 100) for n in (1, 4, 16, 33)]
    assert steps == pytest.approx([0.6, 0.66, 0.9, 1.3])


def test_limit_is_that_of_the_best_number_of_sequences() -> None:
    costs = priced(decode_points=((4, 0.1), (128, 12.8)))  # 128 take four times as long each
    scenario = replace(SCENARIO, costs=costs, shared=True, groups_per_step=1, group_size=4)
    limit = limit_steps_per_s(replace(scenario, slots=128))
    assert simulate(replace(scenario, slots=128)).steps_per_s <= limit * 1.01


def test_points_of_decode_without_time_are_left_out() -> None:
    points = [(8, 80, 0.01), (16, 160, -0.002), (32, 320, 0.03)]
    assert above_zero(points) == [points[0], points[2]]
    assert above_zero(points[1:2]) == [(16, 160, 1e-7)]


def test_more_sequences_than_measured_cost_more() -> None:
    """A plan compares modes with more slots than the recipe that was probed."""
    costs = CostModel(decode_points=((33, 1.3), (1, 0.5), (32, 1.3)), decode_context_s=0.0)
    assert costs.burst_s(1, 65, 0) == pytest.approx(1.3 + 32 * 0.8 / 32)


def test_costs_are_equal_after_writing_and_reading(tmp_path: Path) -> None:
    costs = CostModel(decode_step_s=0.25, environment_s="lognormal:2,0.5", fit_error=0.03)
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(tmp_path / "costs.json") == costs


@pytest.mark.parametrize("text", ['{"decode_step": 1}', '{"decode_step_s": -1}', "[]", "{"])
def test_wrong_costs_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match="Known costs: decode_step_s"):
        read_costs(tmp_path / "costs.json")


def test_missing_costs_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_costs(tmp_path / "none.json")


# --- fit ---


def test_fit_finds_costs_that_made_points() -> None:
    costs = CostModel(decode_step_s=2e-3, decode_sequence_s=3e-6, decode_context_s=4e-9)
    points = [(n, n * c, costs.burst_s(1, n, n * c)) for n in (1, 8, 64, 512) for c in (50, 900)]
    fit = fit_decode(points)
    expected = [2e-3 + 3e-6 * n for n in (1, 8, 64, 512)]
    assert fit.coefficients == pytest.approx((*expected, 4e-9))
    assert fit.error_max < 1e-9


def test_fit_has_no_negative_coefficient() -> None:
    # A larger context is faster here, which is noise: its cost is 0, not negative.
    points = [(1, 100, 1.0), (1, 200, 0.9), (8, 800, 2.0), (8, 1600, 1.9)]
    fit = fit_decode(points)
    assert min(fit.coefficients) >= 0 and fit.coefficients[2] == 0
    assert 0 < fit.error < 0.1


def test_fit_is_at_least_as_good_as_random_coefficients() -> None:
    rng = np.random.default_rng(0)
    rows, seconds = rng.random((12, 3)), rng.random(12) + 0.1
    best = np.array(fit_line(rows.tolist(), seconds.tolist()).coefficients)

    def loss(coefficients: np.ndarray) -> float:
        return float(((rows @ coefficients / seconds - 1) ** 2).sum())

    for _ in range(2000):
        assert loss(best) <= loss(rng.random(3) * rng.choice([0.01, 1, 3], 3)) + 1e-12


def test_fit_of_prefill_tells_cost_of_sequence_from_that_of_its_prompt() -> None:
    waves = [(1, 50), (8, 50), (8, 400), (64, 400), (64, 3200)]
    points = [(n, tokens, 0.1 + 1e-3 * tokens + 2e-2 * n) for n, tokens in waves]
    assert fit_prefill(points).coefficients == pytest.approx((0.1, 1e-3, 2e-2))


def test_fit_of_training_has_cost_of_long_rows() -> None:
    points = [(n, before, 0.1 + 1e-3 * n + 1e-6 * before) for n, before in ((9, 90), (70, 9000))]
    points += [(70, 70, 0.1 + 1e-3 * 70 + 1e-6 * 70)]
    assert fit_train(points).coefficients == pytest.approx((0.1, 1e-3, 1e-6))


def test_fit_rejects_points_without_time() -> None:
    with pytest.raises(ConfigError, match="not above 0"):
        fit_decode([(1, 1, 0.0)])


# --- lengths ---


def test_lognormal_lengths_have_median_and_tail() -> None:
    lengths = read_distribution("lognormal:200,1.0")
    median, p99 = np.quantile([lengths[seed] for seed in range(50_000)], [0.5, 0.99])
    assert median == pytest.approx(200, rel=0.02)
    assert p99 == pytest.approx(200 * np.exp(2.326), rel=0.05)


def test_lengths_are_read_from_run(tmp_path: Path) -> None:
    rows = [{"step": 1, "completions": [{"tokens": 3}, {"tokens": 5}]}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = read_distribution(str(tmp_path))
    assert [lengths[seed] for seed in range(4)] == [3, 5, 3, 5]


def test_lengths_are_read_from_text_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("10\n20\n")
    lengths = read_distribution(str(tmp_path / "lengths.txt"))
    assert [lengths[seed] for seed in range(3)] == [10, 20, 10]


@pytest.mark.parametrize(
    "text", ["lognormal:200", "lognormal:0,1", "fixed:x", "fixed:-1", "list:", "no/such/run"]
)
def test_wrong_lengths_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        read_distribution(text)


# --- theory ---


def test_hybrid_step_is_generation_plus_training() -> None:
    outcome = simulate(replace(SCENARIO, shared=True))
    assert outcome.step_s == pytest.approx(5 + 2)
    assert (outcome.wait_s, outcome.train_s) == pytest.approx((5, 2))
    assert outcome.device_use == pytest.approx(1)


def test_hybrid_step_has_all_costs() -> None:
    costs = CostModel(
        decode_step_s=0.01,
        decode_sequence_s=1e-4,
        decode_context_s=1e-6,
        prefill_token_s=1e-3,
        prefill_sequence_s=2e-3,
        train_step_s=1.0,
        train_token_s=1e-3,
        publish_s=0.5,
        load_s=0.25,
        switch_s=0.125,
    )
    outcome = simulate(replace(SCENARIO, costs=costs, shared=True, train_devices=4))
    decode = costs.burst_s(50, 128, 128 * 100)
    prefill = 16 * 100 * 1e-3 + 128 * 2e-3
    train = 1.0 + (16 * 100 + 128 * 50) * 1e-3 / 4
    assert outcome.step_s == pytest.approx(decode + prefill + train + 0.5 + 0.25 + 2 * 0.125)


@pytest.mark.parametrize("train_s", [0.5, 2.0, 11.0])
def test_fully_async_step_is_longer_of_generation_and_training(train_s: float) -> None:
    costs = PLAIN.model_copy(update={"train_step_s": train_s})
    # One step generates at a time, so that generation takes 5 s per step.
    outcome = simulate(replace(SCENARIO, costs=costs, schedule=AHEAD, slots=128, steps=24))
    assert outcome.step_s == pytest.approx(max(5.0, train_s), rel=0.03)


def test_one_step_off_hides_training() -> None:
    outcome = simulate(replace(SCENARIO, schedule=ScheduleSettings(max_staleness=1), steps=20))
    assert outcome.step_s == pytest.approx(5.0, rel=0.01)


def test_staleness_is_zero_in_hybrid_mode() -> None:
    assert simulate(replace(SCENARIO, shared=True)).staleness_max == 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_staleness_stays_within_its_bound(schedule: ScheduleSettings, shared: bool) -> None:
    scenario = replace(SCENARIO, lengths=LONG_TAIL, schedule=schedule, shared=shared, slots=100)
    assert 0 <= simulate(scenario).staleness_max <= schedule.max_staleness


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_group_is_trained_or_outstanding(schedule: ScheduleSettings) -> None:
    costs = PLAIN.model_copy(update={"failures_per_hour": 20.0, "restart_s": 30.0})
    scenario = replace(SCENARIO, costs=costs, lengths=LONG_TAIL, schedule=schedule, engines=6)
    outcome = simulate(scenario)
    groups = outcome.groups
    assert groups["trained"] == scenario.steps * scenario.groups_per_step
    settled = groups["trained"] + sum(groups["dropped"].values()) + groups["outstanding"]
    assert settled == groups["issued"]


def test_failed_engines_are_replaced_and_cost_time() -> None:
    faulty = PLAIN.model_copy(update={"failures_per_hour": 120.0, "restart_s": 60.0})
    scenario = replace(SCENARIO, schedule=AHEAD, engines=4, slots=8, steps=15)
    scenario = replace(scenario, group_size=2)
    outcome = simulate(replace(scenario, costs=faulty))
    assert outcome.replaced_engines > 0
    assert outcome.steps_per_s < simulate(scenario).steps_per_s


def test_environment_latency_delays_synchronous_step() -> None:
    costs = PLAIN.model_copy(update={"environment_s": "fixed:3", "turns": 2})
    outcome = simulate(replace(SCENARIO, costs=costs, shared=True))
    assert outcome.step_s == pytest.approx(2 * (5 + 3) + 2)


def test_controller_delays_synchronous_step_by_all_of_its_completions() -> None:
    costs = PLAIN.model_copy(update={"host_completion_s": 0.01})
    busy = replace(SCENARIO, costs=costs, shared=True)
    assert simulate(busy).step_s == pytest.approx(5 + 128 * 0.01 + 2)
    ahead = replace(busy, schedule=AHEAD, shared=False)  # handles them while devices work
    assert simulate(ahead).step_s == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_trainer_waits_for_batch_of_controller(shared: bool) -> None:
    costs = PLAIN.model_copy(update={"host_trained_s": 0.05})
    scenario = replace(
        SCENARIO, costs=costs, shared=shared, schedule=AHEAD if not shared else SCENARIO.schedule
    )
    assert simulate(scenario).train_s == pytest.approx(2 + 128 * 0.05)


def test_prompt_is_trained_once_for_completions_of_its_group() -> None:
    trained = replace(SCENARIO, costs=priced(train_token_s=1e-3), shared=True, prompt_tokens=70)
    assert simulate(trained).train_s == pytest.approx((16 * 70 + 128 * 50) * 1e-3)


def test_greedy_baseline_costs_generation_but_no_training() -> None:
    costs = priced(decode_sequence_s=1e-3, train_token_s=1e-3)
    plain = replace(SCENARIO, costs=costs, shared=True, prompt_tokens=10)
    greedy = replace(plain, greedy_baseline=True)
    was, found = simulate(plain), simulate(greedy)
    assert found.train_s == pytest.approx(was.train_s)
    assert found.completion_tokens == was.completion_tokens == 50
    assert found.generate_s == pytest.approx(was.generate_s * 9 / 8)
    assert limit_steps_per_s(greedy) < limit_steps_per_s(plain)


def test_long_completions_leave_engines_idle_in_hybrid_mode() -> None:
    scenario = replace(SCENARIO, shared=True, engines=8, train_devices=8)
    assert simulate(scenario).engines_idle == pytest.approx(0, abs=1e-6)
    assert simulate(replace(scenario, lengths=LONG_TAIL)).engines_idle > 0.1


def test_overlap_with_no_slowdown_hides_training() -> None:
    outcome = simulate(overlapped(1.0))
    assert outcome.step_s == pytest.approx(5.0, rel=0.03)


def test_overlap_with_double_cost_is_no_faster_than_alternating() -> None:
    assert simulate(overlapped(2.0)).step_s == pytest.approx(7.0, rel=0.05)


def overlapped(slowdown: float) -> Scenario:
    costs = PLAIN.model_copy(update={"overlap_decode": slowdown, "overlap_train": slowdown})
    pool = replace(SCENARIO, costs=costs, shared=True, overlap=True, slots=128, steps=24)
    return replace(pool, schedule=AHEAD)


def test_pools_of_one_machine_slow_each_other_down() -> None:
    costs = priced(decode_step_s=0.1, train_step_s=4.0, pool_decode=1.5, pool_train=1.25)
    found = simulate(replace(SCENARIO, costs=costs, schedule=AHEAD, slots=128))
    # Without the other one, generation takes 5 s and training 4 s. In a step, training takes
    # 4 x 1.25 = 5 s, in which the engine does 5 / 1.5 of its 5 s.
    assert found.step_s == pytest.approx(5 + 5 - 5 / 1.5, rel=0.02)
    alone = simulate(replace(SCENARIO, costs=costs, shared=True))
    assert alone.step_s == pytest.approx(9.0)  # hybrid sync alternates


def test_training_of_long_rows_costs_more() -> None:
    costs, steps = priced(train_context_s=1e-6), read_distribution("list:10,190")
    long = simulate(replace(SCENARIO, costs=costs, lengths=steps, prompt_tokens=10, shared=True))
    own = 128 * (10 * 10 + 10**2 / 2 + 10 * 190 + 190**2 / 2) / 2  # tokens before the own ones
    assert long.train_s == pytest.approx((16 * 10**2 / 2 + own) * 1e-6, rel=0.1)
    assert long.train_s < 1.1 / limit_steps_per_s(replace(SCENARIO, costs=costs, lengths=steps))


def test_split_placement_trains_actor_and_critic_concurrently() -> None:
    together = replace(SCENARIO, shared=True, has_critic=True, train_devices=2)
    assert simulate(together).step_s == pytest.approx(5 + 2 + 2)
    divided = replace(together, train_devices=1, critic_devices=1)
    assert simulate(divided).step_s == pytest.approx(5 + 2)


def test_simulation_repeats_exactly() -> None:
    scenario = replace(SCENARIO, lengths=LONG_TAIL, schedule=AHEAD, engines=3)
    assert simulate(scenario) == simulate(scenario)


# --- modes ---


def config(*settings: str) -> RunConfig:
    small = ["steps=6", "groups_per_step=4", "group_size=4"]
    return load_config(None, ["model=tiny", "data.task=reverse:5", *small, *settings])


def by_mode(found: Comparison) -> dict[str, Outcome]:
    return {result.mode: result.outcome for result in found.results}


def test_every_mode_for_devices_is_compared() -> None:
    one = by_mode(compare_modes(config(), PLAIN, devices=1))
    assert list(one) == [HYBRID, "async in turns", "async overlap"]
    several = by_mode(compare_modes(config("algorithm.name=ppo"), PLAIN, devices=4))
    assert list(several) == [
        HYBRID,
        "split placement",
        "one step off",
        "fully async",
        "async in turns",
    ]


def test_async_is_named_when_it_is_faster() -> None:
    found = compare_modes(config("rollout.max_response_length=50"), PLAIN, SCENARIO.lengths, 2)
    assert found.fastest.mode == "fully async"
    assert found.verdict().startswith("fastest: fully async, ")


def test_sync_is_named_when_it_is_faster() -> None:
    """With two devices, separate pools halve the speed of training, which is all there is."""
    found = compare_modes(config(), priced(train_token_s=0.01), devices=2)
    assert found.fastest.mode == HYBRID
    assert "stay synchronous" in found.verdict()


@pytest.mark.parametrize("recipe", ["hybrid", "split", "fully_async", "one_gpu_async"])
def test_settings_of_each_mode_are_accepted_by_recipe(recipe: str) -> None:
    path = Path("recipes", f"{recipe}.toml")
    small = ["groups_per_step=2", "group_size=2"]
    found = compare_modes(load_config(path, small), PLAIN, devices=4, steps=4)
    for result in found.results:
        settings = [*result.settings, "train.backend=fsdp"]
        changed = load_config(path, settings)
        assert changed.schedule.max_staleness == result.outcome.staleness_max


def test_too_few_devices_are_rejected() -> None:
    vllm = config("rollout.engine=vllm", "rollout.tensor_parallel=4", "placement.rollout=engines")
    with pytest.raises(ConfigError, match="an engine needs 4 devices"):
        compare_modes(vllm, PLAIN, devices=2)


def test_simulation_of_many_devices_trains_every_group() -> None:
    """A tenth of the benchmark's size: 100 devices, 10 steps."""
    scenario = replace(SCENARIO, costs=CostModel(), lengths=LONG_TAIL, schedule=AHEAD)
    outcome = simulate(replace(scenario, engines=60, train_devices=40, groups_per_step=32))
    assert outcome.groups["trained"] == 320


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        # Alone, generation takes 4 s and training 2 s.
        ((6.0, 4.0), (2.0, 2.0)),  # alternate: generation has done 2 of its 4 s when training ends
        ((4.0, 2.0), (1.0, 1.0)),  # do not slow each other down
        ((4.0, 5.5), (1.0, 8.0)),  # generation goes first; after 4 s, half a second is trained
        ((20.0, 2.0), (10.0, 1.0)),  # an error of the measurement
    ],
)
def test_slowdowns_of_overlap_follow_from_both_ends(
    ends: tuple[float, float], expected: tuple[float, float]
) -> None:
    assert slowdowns(4.0, 2.0, *ends) == pytest.approx(expected)
