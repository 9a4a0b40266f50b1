"""Statistics of an evaluation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.cli.train import shown
from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.evaluation import for_evaluation
from paceline.held_out import score
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn


def trajectory(reward: float, turn_rewards: tuple[float, ...], finish: Finish) -> Trajectory:
    tokens = np.zeros(3, np.int32)
    made = Completion(tokens, np.zeros(3, np.float32), tokens, finish)
    turns = tuple(Turn((1,), made, turn_reward) for turn_reward in turn_rewards)
    return Trajectory(turns, "", reward, {"length": reward})


def test_statistics_are_those_of_each_agent() -> None:
    one = trajectory(1.0, (0.0,), Finish.STOP)
    agents = [replace(one, agent="a"), replace(one, agent="b", reward=0.0)] * 2
    found = score([Group(0, Prompt("a", (1,), "a", {}), tuple(agents), 0.0, 1.0)], 1.0, asked=1)
    assert found["reward"] == found["reward_max"] == 0.5, "the best is that of each agent"
    assert found["pass@1"] == found["pass@2"] == 0.5 and "pass@4" not in found


def test_statistics_count_rewards_of_turns() -> None:
    trajectories = (
        trajectory(1.0, (0.5, 0.25), Finish.STOP),
        trajectory(0.0, (0.25,), Finish.LENGTH),
    )
    found = score([Group(0, Prompt("a", (1,), "a", {}), trajectories, 0.0, 1.0)], 1.0, asked=1)
    assert found["reward"] == pytest.approx(1.0) and found["reward_max"] == pytest.approx(1.75)
    assert (found["prompts"], found["samples"], found["truncated_fraction"]) == (1, 2, 0.5)
    assert found["tokens_mean"] == 4.5 and found["reward_component/length"] == 0.5


@pytest.mark.parametrize(
    ("value", "text"), [(12500, "12500"), (12345.6, "12346"), (40, "40"), (1 / 3, "0.3333")]
)
def test_statistics_are_shown_without_exponent(value: float, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("samples", [0, -1, "2", None, 1.5])
def test_number_of_samples_is_checked(samples: Any) -> None:
    with pytest.raises(ConfigError, match=r"samples = .*expected a whole number"):
        for_evaluation(load_config("hybrid"), samples)
