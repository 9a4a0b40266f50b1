"""Choice of a reward: verifiers, tasks, weighted sums and Reward objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config
from paceline.errors import ConfigError, DataError, RewardError
from paceline.reward.reward import BuiltinReward, RewardSettings, WeightedReward, open_reward
from paceline.types import Prompt, Trajectory
from tests.processes import children
from tests.scoring import in_loop, opened, score, write_functions

Row = Mapping[str, Any]


def length(completion: str, row: Row) -> float:
    return len(completion)


def ends_well(completion: str, row: Row) -> float | None:
    """Apply only to completions that end."""
    return float(completion.endswith("!")) if completion else None


async def in_parts(completion: str, row: Row) -> dict[str, float]:
    return {"reward": 0.5, "format": 1.0}


@in_loop
async def test_open_reward_uses_task_score_by_default() -> None:
    reward = await open_reward(RewardSettings(), task="sort:3")
    assert isinstance(reward, BuiltinReward)
    assert await score(reward, "123", "999", answer="123") == [1.0, 0.0]
    with pytest.raises(
        RewardError, match=r"reward 'sort:3', prompt 'q7': raised KeyError: 'answer'"
    ):
        await score(reward, "123")
    await reward.close()


@in_loop
async def test_open_reward_finds_verifier_by_name() -> None:
    reward = await open_reward(RewardSettings(function="last_number"), task=None)
    assert await score(reward, "it is 7", answer="#### 7") == [1.0]
    async with opened("regex") as reward:
        assert await score(reward, "A: 7", pattern=r"A: (\d)", answer="7") == [1.0]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("exact", {}, "the row has no 'answer' to compare with"),
        ("boxed", {"answer": None}, r"row\['answer'\] is None; expected text or a number"),
        ("tagged", {"answer": ["a", "b"]}, r"row\['answer'\] is list; expected text or a number"),
        ("last_number", {"answer": "none"}, "contains no number"),
    ],
)
@in_loop
async def test_check_names_row_that_cannot_be_scored(
    name: str, row: dict[str, Any], message: str
) -> None:
    reward = await open_reward(RewardSettings(function=name), task=None)
    assert isinstance(reward, BuiltinReward)
    reward.check([("a.jsonl:1", {"answer": "1"})])
    with pytest.raises(
        DataError,
        match=rf"a\.jsonl:2 cannot be scored with reward\.function = '{name}': .*{message}",
    ):
        reward.check([("a.jsonl:1", {"answer": "1"}), ("a.jsonl:2", row)])


@in_loop
async def test_open_reward_raises_without_reward_for_data_files() -> None:
    with pytest.raises(ConfigError, match=r"need reward\.function"):
        await open_reward(RewardSettings(), task=None)


@in_loop
async def test_reward_may_be_name_of_task() -> None:
    reward = await open_reward(RewardSettings(), None, "sort:3")
    assert await score(reward, "123", answer="123") == [1.0]


@in_loop
async def test_several_rewards_are_summed_with_weights() -> None:
    settings = RewardSettings(weights=(1.0, 0.5, 2.0))
    reward = await open_reward(settings, None, [length, "last_number", in_parts])
    assert await score(reward, "is 7", answer="7") == [
        {
            "reward": 4 + 0.5 * 1 + 2 * 0.5,
            "length": 4.0,
            "last_number": 1.0,
            "in_parts": 0.5,
            "in_parts/format": 1.0,
        }
    ]
    await reward.close()


@in_loop
async def test_several_functions_of_settings_are_summed(tmp_path: Path) -> None:
    file = write_functions(tmp_path)
    settings = RewardSettings(function=(f"{file}:good", f"{file}:none", f"{file}:waiting"))
    reward = await open_reward(settings, None)
    assert await score(reward, "a") == [{"reward": 3.0, "good": 2.0, "waiting": 1.0}]
    assert isinstance(reward, WeightedReward) and reward.processes()
    await reward.close()


@in_loop
async def test_sum_leaves_out_function_that_returns_none() -> None:
    reward = await open_reward(RewardSettings(weights=(1.0, 3.0)), None, [length, ends_well])
    assert await score(reward, "", "a!") == [
        {"reward": 0.0, "length": 0.0},
        {"reward": 5.0, "length": 2.0, "ends_well": 1.0},
    ]
    await reward.close()


@in_loop
async def test_score_raises_when_all_functions_return_none() -> None:
    reward = await open_reward(RewardSettings(), None, [ends_well])
    with pytest.raises(RewardError, match=r"'q7': the reward functions ends_well all returned"):
        await score(reward, "")
    await reward.close()


@in_loop
async def test_score_raises_when_one_of_several_functions_raises() -> None:
    def wrong(completion: str, row: Row) -> float:
        raise KeyError("column")

    reward = await open_reward(RewardSettings(), None, [length, wrong])
    with pytest.raises(RewardError, match=r"reward 'wrong', prompt 'q7': raised KeyError"):
        await score(reward, "a")
    await reward.close()


@in_loop
async def test_equal_names_get_number() -> None:
    def reward(completion: str, row: Row) -> float:
        return 10.0

    both = [length, lambda completion, row: 2.0, length, reward, lambda completion, row: 3.0]
    weighted = await open_reward(RewardSettings(), None, both)
    (found,) = await score(weighted, "a")
    assert found == {
        "reward": 17.0,
        "length_1": 1.0,
        "lambda_1": 2.0,
        "length_2": 1.0,
        "reward_1": 10.0,
        "lambda_2": 3.0,
    }
    await weighted.close()


@in_loop
async def test_check_of_sum_names_row_that_cannot_be_scored() -> None:
    reward = await open_reward(RewardSettings(function=("exact", "last_number")), None)
    assert isinstance(reward, WeightedReward)
    with pytest.raises(DataError, match=r"a\.jsonl:2 .* reward\.function = 'last_number'"):
        reward.check(iter([("a.jsonl:1", {"answer": "1"}), ("a.jsonl:2", {"answer": "none"})]))


def test_config_accepts_list_of_functions() -> None:
    functions = 'reward.function=["exact", "my.py:score"]'
    config = load_config(None, ["data.task=copy:3", functions, "reward.weights=[1, 0.5]"])
    assert config.reward.names == ("exact", "my.py:score")
    assert config.reward.weights == (1.0, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward.weights=[1, 2]"], r"reward\.weights has 2 number\(s\) for 1 reward function"),
        (
            ["reward.function=3"],
            r"reward\.function = 3: expected the name of a function, or a list",
        ),
        (["reward.function=[]"], r"reward\.function = \[\]: expected the name of a function"),
        (["reward.weights=2"], r"reward\.weights = 2: expected a list"),
    ],
)
def test_config_rejects_functions_and_weights_that_do_not_match(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["data.task=copy:3", "reward.function=exact", *settings])


@in_loop
async def test_open_reward_raises_when_program_gives_other_number_of_functions() -> None:
    with pytest.raises(ConfigError, match=r"reward\.weights has 1 number\(s\) for 2 reward"):
        await open_reward(RewardSettings(weights=(1.0,)), None, [length, ends_well])


@in_loop
async def test_open_reward_closes_processes_when_another_function_fails(tmp_path: Path) -> None:
    file = write_functions(tmp_path)
    with pytest.raises(ConfigError, match="one_argument"):
        await open_reward(RewardSettings(function=(f"{file}:good", f"{file}:one_argument")), None)
    assert not children()


@in_loop
async def test_reward_object_is_used_as_it_is() -> None:
    class Judge:
        async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[float]:
            return [0.25] * len(trajectories)

        async def close(self) -> None:
            return

    judge = Judge()
    assert await open_reward(RewardSettings(function="exact"), None, judge) is judge
    both = await open_reward(RewardSettings(), None, [judge, length])
    assert await score(both, "a") == [{"reward": 1.25, "Judge": 0.25, "length": 1.0}]


@in_loop
async def test_open_reward_raises_when_reward_cannot_be_called() -> None:
    wrong: Any = 3
    with pytest.raises(ConfigError, match=r"reward = 3: expected a function of"):
        await open_reward(RewardSettings(), None, wrong)
