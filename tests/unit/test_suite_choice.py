"""What the environment may ask of the guide's commands, and the sentence when it asks for something else."""

import pytest

from benchmarks.suite.cases import FULL, QUICK, SWEEPS, all_cases, case_settings
from benchmarks.suite.choice import Choice, read_choice, read_target
from paceline.config import load_config
from paceline.errors import ConfigError


def test_an_empty_environment_takes_all_gpus_and_the_built_in_model() -> None:
    assert read_choice({}, gpus_present=2) == Choice(gpus=2)
    assert read_choice({"NUM_GPUS": "0", "MODEL_ID": ""}, gpus_present=2) == Choice(gpus=0)


def test_a_path_wins_over_a_hub_id() -> None:
    assert read_choice({"MODEL_ID": "a/b", "MODEL_PATH": "/models/b"}, 0).model == "/models/b"
    assert read_choice({"MODEL_ID": "a/b"}, 0).model == "a/b"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"NUM_GPUS": "two"}, "NUM_GPUS=two is not a number of GPUs; use 0 to 1"),
        ({"NUM_GPUS": "4"}, "NUM_GPUS=4, but there is 1; lower it"),
        (
            {"ACTOR_STRATEGY": "fsdp"},
            "ACTOR_STRATEGY=fsdp is not known; use one of single, fsdp2, megatron",
        ),
        ({"ENGINE": "sglang"}, "ENGINE=sglang is not known; use one of native, vllm"),
        ({"CLUSTER": "slurm"}, "CLUSTER=slurm is not known; use one of local, ray"),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence(
    environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_choice(environment, gpus_present=1)


def test_a_target_is_a_rate_or_nothing() -> None:
    assert read_target({}) is None and read_target({"TARGET_SAMPLES_PER_S": "12.5"}) == 12.5
    for wrong in ("fast", "0", "-1", "nan"):
        with pytest.raises(ConfigError, match="is not a rate"):
            read_target({"TARGET_SAMPLES_PER_S": wrong})


def test_gpus_are_divided_between_training_and_rollout() -> None:
    assert (Choice(gpus=4).train_ranks, Choice(gpus=4).engines()) == (1, 3)
    assert (
        Choice(gpus=4, strategy="fsdp2").train_ranks,
        Choice(gpus=4, strategy="fsdp2").engines(),
    ) == (2, 2)
    assert "train_batch_size=8" in Choice(gpus=4, strategy="fsdp2").settings(batch=4)
    assert (Choice(strategy="fsdp2").train_ranks, Choice(strategy="fsdp2").engines(2)) == (2, 2)


@pytest.mark.parametrize("work", [QUICK, FULL])
@pytest.mark.parametrize(
    "choice",
    [Choice(), Choice(strategy="fsdp2"), Choice(gpus=4), Choice(gpus=4, strategy="megatron")],
)
def test_every_case_of_the_benchmark_is_a_valid_configuration(choice: Choice, work: object) -> None:
    cases = list(all_cases(choice, work))  # type: ignore[arg-type]
    assert (
        {case.sweep for case in cases}
        == set(SWEEPS)
        == {case.sweep for case in cases if case.quick}
    )
    assert len({case.file_name for case in cases}) == len(cases)
    for case in cases:
        recipe = f"recipes/{case.recipe}.toml" if case.recipe else None
        load_config(recipe, case_settings(case, choice, work, model="tiny"))  # type: ignore[arg-type]
