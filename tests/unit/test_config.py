"""Rules that concern several sections of a configuration."""

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.config import check_trainable, load_config
from paceline.errors import ConfigError

TWO_STEPS = ["schedule.max_staleness=1", "schedule.sync_every=2"]


def test_sync_every_is_rejected_when_engine_shares_trainer_weights() -> None:
    with pytest.raises(ConfigError) as rejected:
        load_config(None, TWO_STEPS)
    assert "schedule.sync_every = 2" in str(rejected.value)
    assert "placement.rollout = placement.actor = 'main'" in str(rejected.value)


@pytest.mark.parametrize(
    "setting", ["placement.overlap=true", "placement.rollout=other", "train.lora.rank=4"]
)
def test_sync_every_is_accepted_when_engine_has_separate_weights(setting: str) -> None:
    assert load_config(None, [*TWO_STEPS, setting]).schedule.sync_every == 2


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("rollout.top_p=0.9", "rollout.top_p = 0.9"),
        ("rollout.top_k=5", "rollout.top_k = 5"),
        ("rollout.temperature=0", "rollout.temperature = 0"),
    ],
)
def test_sampling_filter_is_rejected_for_training_only(setting: str, named: str) -> None:
    config = load_config(None, [setting])
    with pytest.raises(ConfigError, match=named):
        check_trainable(config)


def test_values_are_nested_or_dotted_names() -> None:
    nested = load_config(values={"rollout": {"max_response_length": 9}, "train": {"lora": {}}})
    dotted = load_config(values={"rollout.max_response_length": 9, "train.lora.rank": 16})
    assert nested == dotted and nested.rollout.max_response_length == 9


def test_overrides_replace_values_of_program_and_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text("steps = 1\nseed = 1\ngroup_size = 5")
    config = load_config(recipe, ["steps=3"], {"total_training_steps": 2, "seed": 2})
    assert (config.steps, config.seed, config.group_size) == (3, 2, 5)


def test_value_replaces_alternative_of_recipe_unless_it_is_none(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('[data]\ntask = "sort:5"')
    assert load_config(recipe, values={"data.path": "a.jsonl"}).data.task is None
    assert load_config(recipe, values={"data.path": None}).data.task == "sort:5"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout": {"max_response_lenght": 9}}, "did you mean"),
        ({"steps": "many"}, "steps = 'many'"),
        ({"steps": lambda: 3}, "steps = <function"),
        ({"model": {"size": 3}}, "model = "),
        ({"data": 3}, "data is a section"),
        ({"schedule.sync_every": 4}, "schedule.max_staleness = 0"),
    ],
)
def test_wrong_value_raises_config_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(values=values)
