"""GRPOConfig: which fields exist, and which values are rejected."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.trl import GRPOConfig
from paceline.trl.config import ACCEPTED, DEFAULTS, REJECTED, TRANSLATED


def test_field_is_in_one_table_only() -> None:
    assert len(DEFAULTS) == len(TRANSLATED) + len(ACCEPTED) + len(REJECTED)


def test_config_has_defaults_of_trl() -> None:
    config = GRPOConfig("out")
    assert config.output_dir == "out"
    assert (config.learning_rate, config.beta, config.loss_type) == (1e-6, 0.0, "dapo")
    assert (config.num_generations, config.max_completion_length) == (8, 512)


def test_config_rejects_unknown_field_with_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no field 'num_generation'; did you mean 'num_gener"):
        GRPOConfig("out", num_generation=4)


@pytest.mark.parametrize("name", ["max_steps", "learning_rate"])
def test_config_rejects_text_when_field_is_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = '2'; expected a number"):
        GRPOConfig("out", **{name: "2"})


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_field_is_named_when_its_value_is_not_default(name: str) -> None:
    with pytest.raises(ConfigError, match=f"GRPOConfig: {name} = 'other' cannot be honored"):
        GRPOConfig("out", **{name: "other"})


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_field_is_accepted_when_its_value_is_default(name: str) -> None:
    GRPOConfig("out", **{name: REJECTED[name][0]})


def test_config_shows_only_what_differs_from_defaults() -> None:
    assert repr(GRPOConfig("out", beta=0.1)) == "GRPOConfig(output_dir='out', beta=0.1)"


def test_import_loads_neither_torch_nor_trl() -> None:
    program = "import sys, paceline.trl; print({'torch', 'transformers', 'trl'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


def test_settings_of_paceline_may_be_nested() -> None:
    nested = {"reward": {"timeout_s": 5}, "data": {"on_bad_row": "skip"}, "steps": 3}
    expected = {"reward.timeout_s": 5, "data.on_bad_row": "skip", "steps": 3}
    assert GRPOConfig("out", paceline=nested).paceline == expected


def test_settings_of_paceline_are_rejected_when_they_are_no_dict() -> None:
    with pytest.raises(ConfigError, match="paceline = 'x'; expected a dict of settings"):
        GRPOConfig("out", paceline="x")  # type: ignore[arg-type]


@dataclass
class DerivedConfig(GRPOConfig):
    benchmarks: list[str] = field(default_factory=list)


def parsed(arguments: str, kind: Any = GRPOConfig) -> Any:
    from transformers import HfArgumentParser

    (config,) = HfArgumentParser(kind).parse_args_into_dataclasses(arguments.split())
    return config


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--learning_rate 1e-5", 1e-5),
        ("--max_steps 3", 3),
        ("--beta .5", 0.5),
        ("--output_dir out", "out"),
        ("--report_to none", "none"),
        ("--bf16 true", True),
        ("--use_cpu", True),
        ("--no_shuffle_dataset", False),
        ("--reward_weights 0.5 1", [0.5, 1.0]),
        ('--paceline {"schedule.max_staleness":2}', {"schedule.max_staleness": 2}),
    ],
)
def test_parser_of_command_lines_reads_field(argument: str, value: Any) -> None:
    name = argument.split()[0].removeprefix("--no_").removeprefix("--")
    assert getattr(parsed(argument), name) == value


def test_parsed_config_is_that_of_same_arguments() -> None:
    parser = parsed("--output_dir out --max_steps 3 --metric_for_best_model reward")
    assert vars(parser) == vars(GRPOConfig("out", max_steps=3, metric_for_best_model="reward"))


def test_derived_dataclass_has_further_fields_and_checks() -> None:
    config = parsed("--benchmarks a b --max_steps 3", DerivedConfig)
    assert (config.benchmarks, config.max_steps) == (["a", "b"], 3)
    assert (config.paceline, config.output_dir) == ({}, "trainer_output")
    with pytest.raises(ConfigError, match="top_p"):
        DerivedConfig(top_p=0.5)
