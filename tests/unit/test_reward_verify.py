"""Built-in verifiers: accepted and rejected completions, and their running time."""

import time

import pytest

from paceline.reward.verify import boxed, exact, last_number, regex, tagged


@pytest.mark.parametrize(
    ("completion", "wanted", "reward"),
    [
        ("so it is 72.", "48+24=72\n#### 72", 1),
        ("#### 1,234", "#### 1234", 1),
        ("It costs $1,234.50", "1234.5", 1),
        ("-3", "#### -3", 1),
        ("\u22123", "-3", 1),
        ("from 5-3", "#### 3", 1),
        ("72.0", "72", 1),
        ("The answer is...72", "72", 1),
        ("x = .5", "0.5", 1),
        ("7 2", "72", 0),
        ("no idea", "72", 0),
        ("72, or rather 73", "72", 0),
        ("", "72", 0),
    ],
)
def test_last_number_compares_last_number(completion: str, wanted: str, reward: float) -> None:
    assert last_number(completion, {"answer": wanted}) == reward


def test_last_number_raises_when_reference_has_no_number() -> None:
    with pytest.raises(ValueError, match="contains no number"):
        last_number("3", {"answer": "none"})


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"\boxed{42}", 1),
        (r"\boxed{41} no, \boxed{ 42.0 }", 1),
        (r"\boxed{42} no, \boxed{41}", 0),
        (r"\boxed{42", 0),
        ("42", 0),
        ("", 0),
    ],
)
def test_boxed_compares_last_box(completion: str, reward: float) -> None:
    assert boxed(completion, {"answer": 42}) == reward


def test_boxed_accepts_nested_braces() -> None:
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
        (r"\$18.90", "18.9", 1),
        ("1,2", "12", 0),
        (r"\left( 1, 2 \right)", "(1,2)", 1),
        (r"x \leftarrow y", "xarrow y", 0),
        (r"\text{Paris}.", "Paris", 1),
        ("1/0", "0", 0),
        ("9" * 100, "9" * 100 + ".0", 0),
    ],
)
def test_boxed_and_tagged_ignore_formatting(found: str, wanted: str, reward: float) -> None:
    assert boxed(rf"\boxed{{{found}}}", {"answer": wanted}) == reward
    assert tagged(f"<answer>{found}</answer>", {"answer": wanted}) == reward


def test_tagged_compares_last_tag() -> None:
    assert tagged("<answer>no</answer> <answer> Paris </answer>", {"answer": "Paris"}) == 1
    assert tagged("<answer>Paris", {"answer": "Paris"}) == 0
    assert tagged("Paris", {"answer": "Paris"}) == 0


def test_exact_ignores_only_surrounding_spaces() -> None:
    assert exact(" a b \n", {"answer": "a b"}) == 1
    assert exact("ab", {"answer": "a b"}) == 0


def test_regex_compares_last_match_of_row_pattern() -> None:
    row = {"pattern": r"Final: (\w+)", "answer": "yes"}
    assert regex("Final: no. Final: yes", row) == 1
    assert regex("yes", row) == 0


@pytest.mark.parametrize("fragment", ["1", "1,", "1.", "-", r"\boxed{", "{", "<answer>", "$."])
def test_verifiers_take_linear_time_on_degenerate_completions(fragment: str) -> None:
    completion = fragment * 100_000
    start = time.thread_time()  # other tests may have left threads that compute
    for verifier in (exact, last_number, boxed, tagged):
        verifier(completion, {"answer": "1"})
    assert time.thread_time() - start < 2.0
