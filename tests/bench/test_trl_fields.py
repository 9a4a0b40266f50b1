"""The tables of paceline.trl against the classes of the installed TRL."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from trl import rewards as trl_rewards

from paceline.trl import GRPOConfig, GRPOTrainer
from paceline.trl.config import DEFAULTS, EARLIER
from paceline.trl.rewards import get_soft_overlong_punishment, think_format_reward
from paceline.trl.rows import dataset_rows
from paceline.trl.unsupported import METHODS, NAMES

FIELDS = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
# TRL sets these after it has read the arguments, or Paceline leaves them to its own default.
OWN_DEFAULT = {"gradient_checkpointing"}


def default(name: str) -> Any:
    field = FIELDS[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return getattr(field.default, "value", field.default)


def test_every_field_of_trl_is_in_a_table() -> None:
    assert DEFAULTS.keys() - EARLIER == FIELDS.keys()


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - OWN_DEFAULT))
def test_default_is_that_of_trl(name: str) -> None:
    assert DEFAULTS[name] == default(name)


def test_arguments_have_the_names_and_order_of_trl() -> None:
    ours, theirs = (
        list(inspect.signature(kind.__init__).parameters) for kind in (GRPOTrainer, trl.GRPOTrainer)
    )
    assert ours == theirs


def test_rejected_names_are_those_of_trl() -> None:
    assert all(hasattr(trl.GRPOTrainer, name) for name in METHODS)
    assert all(hasattr(trl, name) for name in NAMES)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 8},
        {"generation_batch_size": 64},
    ],
)
def test_generation_batch_has_the_size_of_trl(fields: dict[str, int]) -> None:
    from paceline.trl.translate import plan

    theirs = trl.GRPOConfig("out", use_cpu=True, bf16=False, **fields)
    ours = plan(GRPOConfig("out", **fields), rows=64)
    assert ours.groups * theirs.num_generations == theirs.generation_batch_size
    updates = theirs.steps_per_generation // theirs.gradient_accumulation_steps
    assert ours.updates == updates


def test_dataset_gives_its_rows() -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    assert dataset_rows(Dataset.from_list(rows)) == rows


def test_rewards_are_those_of_trl() -> None:
    texts = ("<think>a</think>b", "b", "<think><think>a</think>b", "<think>a\n</think>\nb")
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert think_format_reward(completions) == trl_rewards.think_format_reward(completions)
    ids = [[0] * count for count in range(12)]
    ours = get_soft_overlong_punishment(10, 4)(ids)
    theirs = trl_rewards.get_soft_overlong_punishment(10, 4)(completion_ids=ids)
    assert ours == pytest.approx(theirs)


def test_parser_of_trl_reads_command_line_and_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("learning_rate: 1.0e-5\nreward_weights: [0.5, 1.0]\nuse_vllm: true\n")
    arguments = ["--config", str(file), "--max_steps", "3"]
    (config,) = trl.TrlParser((GRPOConfig,)).parse_args_and_config(arguments)
    assert (config.learning_rate, config.max_steps, config.use_vllm) == (1e-5, 3, True)
    assert config.reward_weights == [0.5, 1.0]
