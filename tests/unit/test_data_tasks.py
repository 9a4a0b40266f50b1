"""Built-in tasks: rows are reproducible, right answers score 1, everything else less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.tasks import PARTIAL, TASKS, describe_tasks, get_task
from paceline.errors import ConfigError


@pytest.mark.parametrize("name", TASKS)
def test_a_row_depends_on_index_and_seed_alone(name: str) -> None:
    task = get_task(name)
    assert [task.row(i, seed=3) for i in range(20)] == [task.row(i, seed=3) for i in range(20)]
    assert [task.row(i, seed=3) for i in range(20)] != [task.row(i, seed=4) for i in range(20)]


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answer_is_worth_one_and_no_answer_nothing(name: str) -> None:
    task = get_task(name)
    for i in range(50):
        row = task.row(i, seed=0)
        assert task.score(f" {row['answer']}\n", row) == 1.0
        assert task.score("", row) == 0.0


@given(name=st.sampled_from(TASKS), index=st.integers(0, 10**9), answer=st.text(max_size=8))
def test_a_wrong_answer_never_earns_more_than_the_partial_credit(
    name: str, index: int, answer: str
) -> None:
    task = get_task(name)
    row = task.row(index, seed=0)
    if answer.strip() != row["answer"]:
        assert 0.0 <= task.score(answer, row) <= PARTIAL


def test_partial_credit_is_the_share_of_characters_in_place() -> None:
    task = get_task("reverse:4")
    row = {"prompt": "reverse 1234=", "answer": "4321"}
    assert task.score("4329", row) == pytest.approx(PARTIAL * 3 / 4)
    assert task.score("43210", row) == 0.0
    assert get_task("max").score("8", {"answer": "9"}) == 0.0


@pytest.mark.parametrize("name", ["reverse", "copy", "sort", "upper", "rotate"])
def test_difficulty_is_the_length(name: str) -> None:
    assert [len(get_task(f"{name}:{n}").row(0, seed=0)["answer"]) for n in (1, 3, 9)] == [1, 3, 9]


def test_every_task_is_described() -> None:
    assert [name for name, _ in describe_tasks()] == list(TASKS)


def test_the_answers_are_right() -> None:
    for i in range(100):
        left, right = (
            get_task("addition:2")
            .row(i, 0)["prompt"]
            .removeprefix("addition ")
            .removesuffix("=")
            .split("+")
        )
        assert int(get_task("addition:2").row(i, 0)["answer"]) == int(left) + int(right)
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
def test_a_bad_spec_says_what_was_meant(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        get_task(spec)
