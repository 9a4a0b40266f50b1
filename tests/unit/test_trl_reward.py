"""Reward functions written for TRL: their arguments, weights, None, errors and time limit."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError, RewardError
from paceline.trl.history import Pending
from paceline.trl.reward import ColumnReward, check_arguments, name_functions, weights_of
from paceline.trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)
from paceline.types import Completion, Finish, Prompt, Score, Trajectory, Turn

CHAT = [{"role": "user", "content": "What is 1 + 1?"}]


def trajectory(text: str) -> Trajectory:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    completion = Completion(tokens, zeros, np.zeros(len(tokens), np.int32), Finish.STOP)
    return Trajectory((Turn((1,), completion),), text)


def score(
    *functions: Callable[..., Any],
    prompt: Any = "say",
    texts: tuple[str, ...] = ("a", "bb"),
    weights: list[float] | None = None,
    timeout_s: float = 5.0,
    extras: dict[str, Any] | None = None,
    **columns: Any,
) -> list[Score]:
    named = name_functions(functions)
    chosen = weights_of(weights, len(functions))
    reward = ColumnReward(named, chosen, timeout_s, extras or {})
    row = {"prompt": prompt, **columns}
    prompt_of_row = Prompt("row:1", (1,), "", row)

    async def scored() -> list[Score]:
        try:
            return list(await reward.score(prompt_of_row, [trajectory(text) for text in texts]))
        finally:
            await reward.close()

    return asyncio.run(scored())


def totals(scores: list[Score]) -> list[float]:
    return [score["reward"] for score in scores if not isinstance(score, float)]


def test_function_gets_columns_as_lists() -> None:
    def check(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[int],
        **kwargs: Any,
    ) -> list[float]:
        assert prompts == ["say", "say"]
        assert completions == ["a", "bb"]
        assert completion_ids == [[97], [98, 98]]
        assert answer == [3, 3]
        assert "prompt" not in kwargs
        return [0.0, 1.0]

    assert totals(score(check, answer=3)) == [0.0, 1.0]


def test_conversational_prompt_gives_completions_as_messages() -> None:
    def check(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        assert prompts == [CHAT, CHAT]
        assert completions[1] == [{"role": "assistant", "content": "bb"}]
        return [1.0, 1.0]

    assert totals(score(check, prompt=CHAT)) == [1.0, 1.0]


def test_function_gets_trainer_state_when_it_accepts_it() -> None:
    def with_state(completions: list[str], trainer_state: str) -> list[float]:
        return [float(trainer_state == "state") for _ in completions]

    def without(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    assert totals(score(with_state, without, extras={"trainer_state": "state"})) == [1.0, 1.0]


def test_rewards_are_summed_with_weights() -> None:
    def one(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0, 2.0]

    async def two(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [10.0, 20.0]

    assert score(one, two, weights=[1.0, 0.5]) == [
        {"reward": 6.0, "one": 1.0, "two": 10.0},
        {"reward": 12.0, "one": 2.0, "two": 20.0},
    ]


def test_function_is_left_out_where_it_returns_none() -> None:
    def some(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None, 2.0]

    def all_of_them(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0, 1.0]

    assert score(some, all_of_them)[0] == {"reward": 1.0, "all_of_them": 1.0}


def test_completion_without_any_reward_gets_mean_of_its_group() -> None:
    def some(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None, 2.0, 4.0]

    assert totals(score(some, texts=("a", "b", "c"))) == [3.0, 2.0, 4.0]


def test_async_functions_run_concurrently() -> None:
    both = asyncio.Barrier(2)

    async def first(completions: list[str], **kwargs: Any) -> list[float]:
        await both.wait()
        return [1.0, 1.0]

    async def second(completions: list[str], **kwargs: Any) -> list[float]:
        await both.wait()
        return [1.0, 1.0]

    assert totals(score(first, second)) == [2.0, 2.0]


def test_async_callable_object_is_awaited() -> None:
    class Judge:
        async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [1.0, 0.0]

    assert score(Judge())[0] == {"reward": 1.0, "Judge": 1.0}


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (["a", "b"], "expected a list of numbers or None"),
        ([float("nan"), 1.0], "returned nan; expected a finite number"),
        (None, "expected a list of numbers or None"),
        ("12", "expected a list of numbers or None"),
        ({0: 1.0, 1: 0.5}, "expected a list of numbers or None"),
    ],
)
def test_wrong_result_is_error_with_name_of_function(result: Any, problem: str) -> None:
    def wrong(completions: list[str], **kwargs: Any) -> Any:
        return result

    with pytest.raises(RewardError, match=f"'wrong', prompt 'row:1': .*{problem}"):
        score(wrong)


def test_exception_of_function_is_reward_error() -> None:
    def broken(completions: list[str], **kwargs: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(RewardError, match="'broken', prompt 'row:1': raised KeyError"):
        score(broken)


class Scorer:
    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(prompts)


def reference(completions: list[str], ground_truth: list[str]) -> list[float]:
    return [1.0] * len(ground_truth)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (reference, r"'ground_truth'. It gets .*, and the columns of the dataset: answer"),
        (lambda completion, row: 1.0, "lambda.* cannot be called: missing .* 'completion'"),
        (Scorer, r"Scorer is a class; pass an instance of it: Scorer\(\)"),
    ],
)
def test_function_is_rejected_when_dataset_lacks_its_arguments(function: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_arguments(name_functions([function]), [{"prompt": "say", "answer": "4"}])


@pytest.mark.parametrize(
    "function", [Scorer(), functools.partial(reference, ground_truth=["1"]), max]
)
def test_function_is_accepted_when_its_arguments_are_passed(function: Any) -> None:
    check_arguments(name_functions([function]), [{"prompt": "say"}])


def test_function_may_need_a_column_that_some_rows_have() -> None:
    rows = [{"prompt": "say"}, {"prompt": "say", "ground_truth": "4"}]
    check_arguments({"reference": reference}, rows)


def test_function_that_hangs_is_reward_error() -> None:
    async def stuck(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(RewardError, match=r"no reply within 0.05 s \(reward.timeout_s\)"):
        score(stuck, timeout_s=0.05)


def test_metric_is_kept_when_step_ends_while_it_is_logged() -> None:
    pending = Pending()

    class Slow(float):
        """A number whose value arrives after the step has ended, as that of a tensor may."""

        def __float__(self) -> float:
            assert pending.take() == {}
            return 2.0

    pending.log_metric("length", Slow())
    assert pending.take() == {"length": 2.0}


def test_functions_of_one_name_keep_separate_metrics() -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0, 1.0]

    names = list(name_functions([reward, functools.partial(len), reward, len]))
    assert names == ["reward_0", "len", "reward_2", "len_3"]

    def len_2(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0, 1.0]

    assert list(name_functions([len_2, len, len])) == ["len_2", "len", "len_2_2"]


def test_weights_are_rejected_when_their_number_is_wrong() -> None:
    with pytest.raises(ConfigError, match="reward_weights has 1 entries and reward_funcs 2"):
        weights_of([1.0], 2)


def test_weights_are_rejected_when_they_are_not_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"reward_weights = \[1, 'a'\]; expected a list of numbers"
    ):
        weights_of([1, "a"], 2)  # type: ignore[list-item]


def test_accuracy_reward_compares_boxed_results() -> None:
    answers = [[{"role": "assistant", "content": text}] for text in (r"so \boxed{1/2}", "1/2")]
    solutions = [r"$\frac{1}{2}$", r"$\frac{1}{2}$"]
    assert accuracy_reward(answers, solutions, other=[1, 2]) == [1.0, 0.0]


def test_think_format_reward_wants_one_thought() -> None:
    texts = ("<think>a</think>b", "b", "<think><think>a</think>b")
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    assert think_format_reward(answers) == [1.0, 0.0, 0.0]


def test_soft_overlong_punishment_falls_over_last_tokens() -> None:
    penalty = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    assert penalty([[0] * count for count in (6, 8, 10, 11)]) == [0.0, -0.5, -1.0, -1.0]
