"""Built-in tasks: reproducible rows, correct reference answers, and scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.tasks import PARTIAL, TASKS, describe_tasks, get_task
from paceline.errors import ConfigError


@pytest.mark.parametrize("name", TASKS)
def test_row_depends_only_on_index_and_seed(name: str) -> None:
    task = get_task(name)
    assert [task.row(i, seed=3) for i in range(20)] == [task.row(i, seed=3) for i in range(20)]
    assert [task.row(i, seed=3) for i in range(20)] != [task.row(i, seed=4) for i in range(20)]


@pytest.mark.parametrize("name", TASKS)
def test_score_is_1_when_exact_and_0_when_empty(name: str) -> None:
    task = get_task(name)
    for i in range(50):
        row = task.row(i, seed=0)
        assert task.score(f" {row['answer']}\n", row) == 1.0
        assert task.score("", row) == 0.0


@given(name=st.sampled_from(TASKS), index=st.integers(0, 10**9), completion=st.text(max_size=8))
def test_score_of_wrong_completion_is_at_most_partial(
    name: str, index: int, completion: str
) -> None:
    task = get_task(name)
    row = task.row(index, seed=0)
    if completion.strip() != row["answer"]:
        assert 0.0 <= task.score(completion, row) <= PARTIAL


def test_partial_score_is_proportional_to_characters_in_place() -> None:
    task = get_task("reverse:4")
    row = {"prompt": "reverse 1234=", "answer": "4321"}
    assert task.score("4329", row) == pytest.approx(PARTIAL * 3 / 4)
    assert task.score("43210", row) == 0.0
    assert get_task("max").score("8", {"answer": "9"}) == 0.0


@pytest.mark.parametrize("name", ["reverse", "copy", "sort", "upper", "rotate"])
def test_difficulty_is_length_of_answer(name: str) -> None:
    assert [len(get_task(f"{name}:{n}").row(0, seed=0)["answer"]) for n in (1, 3, 9)] == [1, 3, 9]


def test_describe_tasks_lists_every_task() -> None:
    assert [name for name, _ in describe_tasks()] == list(TASKS)


def test_reference_answers_are_correct() -> None:
    for i in range(100):
        row = get_task("addition:2").row(i, 0)
        left, right = row["prompt"].removeprefix("addition ").removesuffix("=").split("+")
        assert int(row["answer"]) == int(left) + int(right)
        row = get_task("count:9").row(i, 0)
        letter, text = row["prompt"].removeprefix("count ").removesuffix("=").split(" in ")
        assert row["answer"] == str(text.count(letter))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("revrse", "did you mean 'reverse'?"),
        ("sort:", "from 1 to 64; did you mean 'sort:5'?"),
        ("sort:0", "from 1 to 64"),
        ("sort:many", "from 1 to 64"),
        ("addition:10", "from 1 to 9"),
        ("zzz", "Built-in tasks: copy, reverse, sort"),
    ],
)
def test_error_suggests_valid_spec(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        get_task(spec)
