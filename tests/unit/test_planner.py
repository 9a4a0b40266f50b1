"""The planner proposes the fastest mode that fits, with settings that a run accepts."""

from collections.abc import Sequence
from functools import cache

import pytest

from paceline.config import RunConfig, load_config
from paceline.data.tiny import resolve_model
from paceline.errors import ConfigError
from paceline.model.known_shapes import known_shape
from paceline.model.loading import load_config as load_model_config
from paceline.simulator.costs import CostModel
from paceline.simulator.limit import limit_steps_per_s
from paceline.simulator.modes import HYBRID, Comparison, compare_modes
from paceline.simulator.planner import STALENESS, Proposal, propose
from paceline.workers.cluster import Node, parse_nodes

SMALL = ["model=tiny", "data.task=reverse:5", "groups_per_step=8", "group_size=4", "steps=6"]
FREE = {"decode_sequence_s": 0.0, "decode_context_s": 0.0, "prefill_token_s": 0.0, "load_s": 0.0}
GENERATES = CostModel(decode_step_s=0.01, train_step_s=0.0, train_token_s=1e-5, **FREE)
TRAINS = CostModel(decode_step_s=1e-5, train_step_s=0.0, train_token_s=1e-2, **FREE)


def configure(more: Sequence[str] = ()) -> RunConfig:
    return load_config(None, [*SMALL, "rollout.max_response_length=256", *more])


@cache  # a comparison simulates every mode, which takes seconds
def compared(costs: CostModel, devices: int) -> Comparison:
    return compare_modes(configure(), costs, devices=devices, staleness=STALENESS)


def proposed(costs: CostModel, devices: str) -> Proposal:
    nodes = parse_nodes(devices)
    model = load_model_config(resolve_model("tiny", "reverse:5"))
    return propose(compared(costs, sum(node.gpus for node in nodes)), configure, model, nodes)


def test_asynchronous_mode_is_proposed_when_generation_takes_long() -> None:
    found = proposed(GENERATES, "4:24GB")
    assert found.result.mode != HYBRID
    words = "\n".join(found.lines())
    for part in ("proposal: ", "steps/s", "of the limit", "staleness", "slots", "micro-batches"):
        assert part in words
    assert "memory of a device: " in words and "of 24 GB" in words


def test_sync_is_proposed_plainly_when_it_wins() -> None:
    found = proposed(TRAINS, "2:24GB")
    assert found.result.mode == HYBRID
    assert any("Synchronous wins" in line for line in found.lines())


@pytest.mark.parametrize("costs", [GENERATES, TRAINS])
def test_run_accepts_proposed_settings(costs: CostModel) -> None:
    found = proposed(costs, "4:24GB")
    config = configure(found.settings)
    assert config.slots == found.result.scenario.slots
    assert config.schedule == found.result.scenario.schedule
    assert config.train.micro_batch_tokens == found.layout.config.train.micro_batch_tokens


def test_staleness_is_lowest_of_those_that_are_as_fast() -> None:
    """Training takes nearly all of the time, so running further ahead gains nothing."""
    for result in compared(TRAINS, 4).results:
        assert result.outcome.staleness_max <= 1


def test_staleness_of_recipe_is_kept() -> None:
    config = configure(["schedule.max_staleness=3", "schedule.on_sync=swap"])
    found = compare_modes(config, GENERATES, devices=4, staleness=STALENESS)
    bounds = {each.mode: each.scenario.schedule.max_staleness for each in found.results}
    assert bounds["fully async"] == 3


def test_preferred_mode_that_is_not_possible_is_passed_over_and_explained() -> None:
    """An engine of two devices fits into a separate pool, but not into a pool of three ranks."""
    engine = ["rollout.engine=vllm", "rollout.tensor_parallel=2", "placement.rollout=engines"]

    def of_recipe(more: Sequence[str] = ()) -> RunConfig:
        return configure([*engine, *more])

    modes = compare_modes(of_recipe(), TRAINS, devices=3, staleness=STALENESS)
    found = propose(modes, of_recipe, known_shape("0.5b"), parse_nodes("3:80GB"))
    assert modes.preferred[0].mode == HYBRID and not found.result.shared
    assert found.lines()[0].startswith(f"{HYBRID} is not possible: ")


def test_error_names_what_each_mode_lacks_when_none_fits() -> None:
    model = load_model_config(resolve_model("tiny", "reverse:5"))
    modes, nodes = compared(GENERATES, 4), [Node("a", 8, gpus=4, memory=64 << 30, gpu_memory=1)]
    with pytest.raises(ConfigError) as error:
        propose(modes, configure, model, nodes)
    for result in modes.results:
        assert f"; {result.mode} is not possible: GPU a:0 has 0.0 GB" in str(error.value)


@pytest.mark.parametrize("devices", [1, 4])
def test_no_mode_is_faster_than_its_limit(devices: int) -> None:
    for costs in (GENERATES, CostModel()):
        for result in compared(costs, devices).results:
            limit = limit_steps_per_s(result.scenario)
            assert result.outcome.steps_per_s <= 1.05 * limit, result.mode


def test_prediction_has_parts_of_proposal() -> None:
    found = proposed(GENERATES, "4:24GB")
    prediction = found.prediction()
    assert prediction.steps_per_s == found.result.outcome.steps_per_s
    assert prediction.completions == 32
    assert prediction.generate_s > prediction.train_s > 0
