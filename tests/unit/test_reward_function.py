"""Reward functions of files and modules: accepted results, errors, and specs that fail to load."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError, RewardError
from paceline.reward.function import RewardFunctionError, as_reward, function_name
from paceline.reward.reward import RewardSettings, open_reward
from tests.fault_report import Fault
from tests.processes import children
from tests.scoring import in_loop, opened, score


@in_loop
async def test_rewards_are_returned_in_order(functions: Path) -> None:
    async with opened(f"{functions}:good") as reward:
        assert await score(reward, "a", "bbb", "") == [2.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("coroutine", [1.0, 1.0]),
        ("Scorer", [1.0, 2.0]),  # one instance scores all completions
        ("true", [1.0, 1.0]),
        (
            "components",
            [
                {"reward": 0.5, "format": 1.0, "length": 1.0},
                {"reward": 0.5, "format": 1.0, "length": 2.0},
            ],
        ),
    ],
)
@in_loop
async def test_reward_may_be_async_or_class_or_return_bool_or_dict(
    functions: Path, name: str, rewards: list[Any]
) -> None:
    async with opened(f"{functions}:{name}") as reward:
        assert await score(reward, "a", "bb") == rewards


def test_as_reward_accepts_only_scalars_of_numpy_and_torch() -> None:
    values = [
        np.float32(0.5),
        np.int64(2),
        np.True_,
        np.array(1.5),
        torch.tensor(0.25),
        torch.tensor(True),
    ]
    assert [as_reward(value) for value in values] == [0.5, 2.0, 1.0, 1.5, 0.25, 1.0]
    for value in (
        np.array([1.5]),
        torch.tensor([1.5]),
        torch.tensor(1j),
        np.array("text"),
        np.float32("nan"),
    ):
        with pytest.raises(RewardFunctionError, match="expected a"):
            as_reward(value)


def test_as_reward_trains_on_reward_of_dict_that_also_has_score() -> None:
    assert as_reward({"reward": 1, "score": 0.5}) == {"reward": 1.0, "score": 0.5}
    assert as_reward({"score": 0.5, "reward": 1}) == {"reward": 1.0, "score": 0.5}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", r"raised ValueError: invalid literal for int\(\).*'xa' \(.*my_rewards\.py:7\)"),
        ("exiting", "raised SystemExit: bye"),
        ("none", r"returned None \(NoneType\); expected a number"),
        ("nan", r"returned nan \(float\); expected a finite number"),
        ("inf", r"returned -inf \(float\); expected a finite number"),
        ("huge", r"returned 10{190}.*\(int\); expected a finite number of at most 3.4e"),
        ("text", r"returned '1\.0' \(str\); expected a number"),
        ("array", r"returned \[1\.0\] \(list\); expected a number"),
        ("no_reward", r"returned {'format': 1\.0}; a dict needs a 'reward'"),
        ("dying", "its process ended with exit code 3"),
        ("crashing", "its process ended with signal SIGSEGV"),
    ],
)
@in_loop
@pytest.mark.fault("D2", "bad reward: {name}")
async def test_score_raises_error_that_names_function_and_prompt(
    functions: Path, name: str, message: str, fault: Fault
) -> None:
    async with opened(f"{functions}:{name}") as reward:
        for _ in range(2):  # the second call shows that the worker survived or was replaced
            with pytest.raises(
                RewardError, match=rf"my_rewards\.py:{name}', prompt 'q7': .*{message}"
            ):
                await score(reward, "a")
        fault.fired()
        assert len(reward.pids) == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "no module 'no_such_module'; searched .*"),
        ("no/such/file.py:f", r"no file 'no/such/file\.py' \(relative paths start at "),
        ("{file}:gud", "no 'gud' in .*my_rewards.py; it defines good, true"),
        ("{file}:number", "'number' in .*my_rewards.py is int, not a function"),
        (
            "{file}:one_argument",
            r"one_argument\(completion\) cannot be called as reward\(completion, row\)",
        ),
        (
            "{file}:generator",
            "'generator' is a generator; expected a function that returns a number",
        ),
        (
            "{file}:for_trl",
            r"written for TRL; .* reward\(completion, row\)\. Wrap it: "
            r".*return for_trl\(completions=\[completion\], \*\*row\)\[0\]",
        ),
        (
            "{file}:for_verl",
            r'written for verl; .* for_verl\(row\["data_source"\], completion, .*ground_truth',
        ),
        (
            "{file}:Scorer.__call__",
            r"cannot be called as reward\(completion, row\), where row is the dataset row",
        ),
        ("{wrong}:f", r"importing it raised SyntaxError: .* \(.*wrong\.py:2\)"),
        (
            "{broken}:f",
            r"importing it raised NameError: name 'oops' is not defined \(.*broken\.py:2\)",
        ),
        (
            "last_nubmer",
            "neither a verifier nor a task nor an entry point of 'paceline.rewards'; "
            "did you mean 'last_number'?",
        ),
    ],
)
@in_loop
async def test_open_reward_raises_when_function_cannot_be_loaded(
    functions: Path, function: str, message: str
) -> None:
    broken = functions.with_name("broken.py")
    broken.write_text("import os\noops\n")
    wrong = functions.with_name("wrong.py")
    wrong.write_text("import os\ndef f(completion, row:\n")
    spec = function.format(file=functions, broken=broken, wrong=wrong)
    with pytest.raises(ConfigError, match=rf"reward\.function = .*{message}"):
        await open_reward(RewardSettings(function=spec), task=None)


@in_loop
async def test_open_reward_raises_one_error_when_all_workers_fail_to_load(functions: Path) -> None:
    settings = RewardSettings(function=f"{functions}:gud", workers=2)
    with pytest.raises(ConfigError, match="no 'gud' in"):
        await open_reward(settings, task=None)
    assert not children()


@in_loop
async def test_reward_may_be_function_of_module(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(functions.parent))
    async with opened("my_rewards:good") as reward:
        assert await score(reward, "aa") == [3.0]


@in_loop
async def test_each_call_gets_copy_of_row(functions: Path) -> None:
    async with opened(f"{functions}:changing_row") as reward:
        assert await score(reward, "a", "b") == [1.0, 1.0]


@in_loop
async def test_score_raises_when_row_cannot_be_sent(functions: Path) -> None:
    async with opened(f"{functions}:good") as reward:
        with pytest.raises(RewardError, match=r"prompt 'q7': .*row cannot be sent to a process"):
            await score(reward, "a", unsendable=lambda: None)
        assert await score(reward, "a") == [2.0]


def test_function_name_is_short_for_any_callable() -> None:
    class Scorer:
        def __call__(self, completion: str, row: dict[str, Any]) -> float:
            return 1.0

    named = [score, Scorer, Scorer(), lambda completion, row: 1.0, "dir/my.py:score", "exact"]
    expected = ["score", "Scorer", "Scorer", "lambda", "score", "exact"]
    assert [function_name(function) for function in named] == expected
