"""Environment variables of the end-to-end test and the benchmark, and their error messages."""

import pytest

from benchmarks.suite.cases import FULL, QUICK, SWEEPS, Work, all_cases, case_settings
from benchmarks.suite.choice import Choice, read_choice, read_target
from paceline.config import load_config
from paceline.errors import ConfigError


def test_choice_uses_all_gpus_and_builtin_model_by_default() -> None:
    assert read_choice({}, gpus_present=2) == Choice(gpus=2)
    assert read_choice({"NUM_GPUS": "0", "MODEL_ID": ""}, gpus_present=2) == Choice(gpus=0)


def test_choice_prefers_model_path_when_model_id_is_set_too() -> None:
    assert read_choice({"MODEL_ID": "a/b", "MODEL_PATH": "/models/b"}, 0).model == "/models/b"
    assert read_choice({"MODEL_ID": "a/b"}, 0).model == "a/b"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NUM_GPUS": "two"}, "NUM_GPUS=two: expected 0 to 1"),
        ({"NUM_GPUS": "4"}, "NUM_GPUS=4: expected 0 to 1"),
        (
            {"ACTOR_STRATEGY": "fsdp"},
            "ACTOR_STRATEGY=fsdp: expected one of single, fsdp2, megatron",
        ),
        ({"ENGINE": "sglang"}, "ENGINE=sglang: expected one of native, vllm"),
        ({"CLUSTER": "slurm"}, "CLUSTER=slurm: expected one of local, ray"),
    ],
)
def test_choice_raises_config_error_when_value_is_invalid(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_choice(environment, gpus_present=1)


def test_target_is_optional_rate() -> None:
    assert read_target({}) is None
    assert read_target({"TARGET_SAMPLES_PER_S": "12.5"}) == 12.5


@pytest.mark.parametrize("value", ["fast", "0", "-1", "nan"])
def test_target_raises_config_error_when_not_positive(value: str) -> None:
    with pytest.raises(ConfigError, match=f"TARGET_SAMPLES_PER_S={value}: expected a number"):
        read_target({"TARGET_SAMPLES_PER_S": value})


def test_choice_divides_gpus_between_training_and_rollout() -> None:
    sharded = Choice(gpus=4, strategy="fsdp2")
    assert (Choice(gpus=4).train_ranks, Choice(gpus=4).engines()) == (1, 3)
    assert (sharded.train_ranks, sharded.engines()) == (2, 2)
    assert "train_batch_size=8" in sharded.settings(batch=4)
    assert (Choice(strategy="fsdp2").train_ranks, Choice(strategy="fsdp2").engines(2)) == (2, 2)


@pytest.mark.parametrize("work", [QUICK, FULL])
@pytest.mark.parametrize(
    "choice",
    [Choice(), Choice(strategy="fsdp2"), Choice(gpus=4), Choice(gpus=4, strategy="megatron")],
)
def test_every_benchmark_case_is_valid_configuration(choice: Choice, work: Work) -> None:
    cases = list(all_cases(choice, work))
    assert {case.sweep for case in cases} == set(SWEEPS)
    assert {case.sweep for case in cases if case.quick} == set(SWEEPS)
    assert len({case.file_name for case in cases}) == len(cases)
    for case in cases:
        recipe = f"recipes/{case.recipe}.toml" if case.recipe else None
        load_config(recipe, case_settings(case, choice, work, model="tiny"))
