"""Verifiers agree with what a person would accept, and take linear time."""

import time

import pytest

from paceline.reward.verify import boxed, exact, last_number, regex, tagged


@pytest.mark.parametrize(
    ("answer", "wanted", "reward"),
    [
        ("so it is 72.", "48+24=72\n#### 72", 1),
        ("#### 1,234", "#### 1234", 1),
        ("It costs $1,234.50", "1234.5", 1),
        ("-3", "#### -3", 1),
        ("\u22123", "-3", 1),
        ("from 5-3", "#### 3", 1),
        ("72.0", "72", 1),
        ("7 2", "72", 0),
        ("no idea", "72", 0),
        ("72, or rather 73", "72", 0),
        ("", "72", 0),
    ],
)
def test_the_last_number_counts(answer: str, wanted: str, reward: float) -> None:
    assert last_number(answer, {"answer": wanted}) == reward


def test_a_row_without_a_number_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        last_number("3", {"answer": "none"})


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (r"\boxed{42}", 1),
        (r"\boxed{41} no, \boxed{ 42.0 }", 1),
        (r"\boxed{42} no, \boxed{41}", 0),
        (r"\boxed{42", 0),
        ("42", 0),
        ("", 0),
    ],
)
def test_the_last_box_counts(answer: str, reward: float) -> None:
    assert boxed(answer, {"answer": 42}) == reward


def test_a_box_may_hold_braces() -> None:
    assert boxed(r"thus \boxed{\frac{1}{2}}.", {"answer": r"\frac{1}{2}"}) == 1


@pytest.mark.parametrize(
    ("found", "wanted", "reward"),
    [
        ("18", "9 * 2 = 18 a day\n#### 18", 1),  # a worked solution of GSM8K
        ("17", "9 * 2 = 18 a day\n#### 18", 0),
        (r"\dfrac{1}{2}", r"Half of it, so \boxed{\frac{1}{2}}.", 1),  # and of MATH
        ("0.5", "1/2", 1),
        (r"-\frac{3}{6}", "-0.5", 1),
        ("$1,234$", "1234", 1),
        ("1,2", "12", 0),
        (r"\left( 1, 2 \right)", "(1,2)", 1),
        (r"x \leftarrow y", "xarrow y", 0),
        (r"\text{Paris}.", "Paris", 1),
        ("1/0", "0", 0),
        ("9" * 100, "9" * 100 + ".0", 0),
    ],
)
def test_what_only_looks_different_is_the_same(found: str, wanted: str, reward: float) -> None:
    assert boxed(rf"\boxed{{{found}}}", {"answer": wanted}) == reward
    assert tagged(f"<answer>{found}</answer>", {"answer": wanted}) == reward


def test_the_last_tag_counts() -> None:
    assert tagged("<answer>no</answer> <answer> Paris </answer>", {"answer": "Paris"}) == 1
    assert tagged("<answer>Paris", {"answer": "Paris"}) == 0
    assert tagged("Paris", {"answer": "Paris"}) == 0


def test_exact_ignores_spaces_around_only() -> None:
    assert exact(" a b \n", {"answer": "a b"}) == 1
    assert exact("ab", {"answer": "a b"}) == 0


def test_a_pattern_of_the_row_picks_the_answer() -> None:
    row = {"pattern": r"Final: (\w+)", "answer": "yes"}
    assert regex("Final: no. Final: yes", row) == 1
    assert regex("yes", row) == 0


@pytest.mark.parametrize("piece", ["1", "1,", "1.", "-", r"\boxed{", "{", "<answer>", "$."])
def test_degenerate_answers_take_linear_time(piece: str) -> None:
    answer = piece * 100_000
    start = time.process_time()
    for verifier in (exact, last_number, boxed, tagged):
        verifier(answer, {"answer": "1"})
    assert time.process_time() - start < 2.0
