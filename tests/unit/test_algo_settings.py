"""Presets, and settings that conflict with each other."""

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.algo.presets import PRESETS
from paceline.algo.settings import AlgorithmSettings
from paceline.config import load_config
from paceline.errors import ConfigError


def settings(**values: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(values)


@pytest.mark.parametrize("name", PRESETS)
def test_explicit_settings_override_preset(name: str) -> None:
    preset = settings(name=name)
    assert {field: getattr(preset, field) for field in PRESETS[name]} == PRESETS[name]
    changed = settings(name=name, aggregation="sequence", normalize="batch", entropy_coef=0.5)
    assert (changed.aggregation, changed.normalize, changed.entropy_coef) == (
        "sequence",
        "batch",
        0.5,
    )
    assert changed.loss == preset.loss and changed.advantage == preset.advantage


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_round_trip_through_json(name: str) -> None:
    preset = settings(name=name)
    assert settings(**preset.model_dump(mode="json")) == preset


def test_names_match_presets() -> None:
    assert set(AlgorithmSettings.model_json_schema()["properties"]["name"]["enum"]) == set(PRESETS)


def test_correction_sets_proximal_policy_with_bounds() -> None:
    assert (settings().proximal, settings().correction) == ("behavior", "none")
    truncated = settings(correction="truncate")
    assert (truncated.proximal, truncated.correction_range) == ("recomputed", (0.0, 2.0))
    assert settings(proximal="interpolated").correction == "truncate"
    assert settings(proximal="recomputed", correction="none").correction == "none"
    assert settings(correction="icepop").correction_range == (0.5, 5.0)
    assert settings(correction="mask", correction_range=[0.1, 9]).correction_range == (0.1, 9.0)
    assert settings(reject_range=(0.9, 1.1)).proximal == "recomputed"


def test_presets_need_expected_roles() -> None:
    assert [name for name in PRESETS if settings(name=name).needs_critic] == ["ppo"]
    assert [name for name in PRESETS if settings(name=name).needs_greedy_baseline] == ["remax"]
    assert [name for name in PRESETS if settings(name=name).needs_reference] == ["distill"]
    assert [name for name in PRESETS if not settings(name=name).uses_rewards] == ["distill"]
    assert settings(kl_coef=0.1).needs_reference
    assert [name for name in PRESETS if not settings(name=name).compares_completions] == [
        "ppo",
        "reinforce++",
        "remax",
        "distill",
    ]
    assert settings(name="grpo", advantage="gae", normalize="batch").needs_critic


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"correction": "truncate", "proximal": "behavior"},
            ["correction = 'truncate'", "proximal = 'behavior'"],
        ),
        (
            {"correction": "m2po", "proximal": "interpolated"},
            ["correction = 'm2po'", "proximal = 'interpolated'"],
        ),
        (
            {"correction": "icepop", "correction_level": "sequence"},
            ["'icepop'", "correction_level"],
        ),
        ({"name": "ppo", "normalize": "group"}, ["normalize = 'group'", "advantage = 'gae'"]),
        ({"name": "grpo", "advantage": "greedy"}, ["normalize = 'group'", "advantage = 'greedy'"]),
        ({"kl_target": 0.1}, ["kl_target", "kl_coef = 0.0"]),
        ({"constant_length": 8}, ["constant_length = 8", "aggregation = 'sequence'"]),
        ({"name": "sapo", "dual_clip": 3.0}, ["dual_clip = 3.0", "loss = 'sapo'"]),
        ({"name": "pg", "clip_high": 0.3}, ["clip_high = 0.3", "loss = 'pg'"]),
        ({"sapo_temperatures": (1, 2)}, ["sapo_temperatures", "loss = 'clip'"]),
        ({"correction_range": (0.5, 2)}, ["correction_range", "correction = 'none'"]),
        ({"critic_warmup": 3}, ["critic_warmup = 3", "advantage = 'group'"]),
        ({"lam": 0.9}, ["lam = 0.9", "advantage = 'group'"]),
        ({"overlong_buffer": 8}, ["overlong_buffer = 8", "overlong = 'keep'"]),
        ({"correction": "mask", "correction_range": (2, 1)}, ["correction_range = (2.0, 1.0)"]),
        ({"name": "sapo", "sapo_temperatures": (0, 1)}, ["sapo_temperatures", "above 0"]),
        ({"name": "gpro"}, ["name"]),
        (
            {"reject_range": (0.5, 2), "proximal": "behavior"},
            ["reject_range = (0.5, 2.0)", "proximal = 'behavior'"],
        ),
        ({"teacher": "x/y"}, ["teacher = 'x/y'", "kl_coef = 0.0", "nothing would use the teacher"]),
        ({"name": "distill", "teacher": "x/y", "kl_coef": 0}, ["teacher = 'x/y'", "kl_coef = 0.0"]),
        ({"name": "distill", "kl_estimator": "k3"}, ["kl_estimator = 'k3'", "kl_placement"]),
        ({"name": "distill", "kl_placement": "loss"}, ["advantage = 'none'", "kl_placement"]),
        ({"advantage": "none", "normalize": "none"}, ["advantage = 'none'", "kl_coef = 0.0"]),
        ({"name": "distill", "normalize": "group"}, ["normalize = 'group'", "advantage = 'none'"]),
        ({"name": "distill", "dynamic_sampling": True}, ["dynamic_sampling", "advantage = 'none'"]),
        ({"name": "distill", "overlong": "penalty"}, ["overlong", "advantage = 'none'"]),
        ({"name": "distill", "kl_target": 0.1}, ["kl_target = 0.1", "advantage = 'none'"]),
    ],
)
def test_conflicting_settings_are_rejected_by_name(
    values: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ValidationError) as rejected:
        settings(**values)
    assert all(text in str(rejected.value) for text in named), str(rejected.value)


def test_dynamic_sampling_is_rejected_when_group_size_is_1() -> None:
    with pytest.raises(
        ConfigError,
        match=r"group_size = 1 contradicts algorithm.dynamic_sampling = true.*every group would be",
    ):
        load_config(None, ["group_size=1", "algorithm.name=ppo", "algorithm.dynamic_sampling=true"])


def test_list_of_algorithms_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name"):
        load_config(overrides=['algorithm.name=["grpo"]'])
