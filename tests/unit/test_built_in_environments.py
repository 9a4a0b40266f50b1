"""Environments by name: their rows, episodes and rewards, and mistakes in names and arguments."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import load_config
from paceline.early_checks import check_early
from paceline.environment.adapters.gymnasium import Gymnasium
from paceline.environment.built_in.countdown import evaluate
from paceline.environment.lookup import BUILT_IN, check_name, describe_environments, locate
from paceline.errors import ConfigError
from paceline.inputs import load_inputs
from paceline.types import End
from tests.episodes import Model, tokens

PROBLEM = {"prompt": "Make 10.", "numbers": [2, 3, 4], "target": 10}


def rows_of(name: str, seed: int = 0, **arguments: Any) -> list[Any]:
    make = locate(name, arguments).rows(held_out=False)
    assert make is not None
    return list(make(seed))


@pytest.mark.parametrize("name", ["countdown", "guess"])
def test_rows_are_pure_function_of_seed(name: str) -> None:
    first, again, other = (rows_of(name, seed, size=40) for seed in (1, 1, 2))
    assert first == again and first != other and len(first) == 40


@pytest.mark.parametrize("actions", [*itertools.permutations(["north", "east", "north-east"])])
def test_gymnasium_takes_last_action_by_its_whole_name(actions: tuple[str, ...]) -> None:
    environment = Gymnasium("any", actions=actions)
    environment._env = SimpleNamespace(action_space=SimpleNamespace(n=3, start=1))
    for text in actions:
        assert environment._action(f"not north, {text}.") == actions.index(text) + 1
    assert environment._action("south") is None


@pytest.mark.parametrize("numbers", [2, 4])
def test_countdown_problems_have_solution(numbers: int) -> None:
    for row in rows_of("countdown", numbers=numbers, highest=12, size=20):
        assert len(row["numbers"]) == numbers and str(row["target"]) in row["prompt"]
        assert row["target"] in reachable(row["numbers"])


def reachable(numbers: list[int]) -> set[int]:
    """Return what left-nested expressions of + - * reach, found by trying all of them."""
    found = set()
    for order in itertools.permutations(numbers):
        for signs in itertools.product("+-*", repeat=len(numbers) - 1):
            value = order[0]
            for sign, number in zip(signs, order[1:], strict=True):
                value = {"+": value + number, "-": value - number, "*": value * number}[sign]
            found.add(value)
    return found


def test_countdown_gives_feedback_and_another_try() -> None:
    model = Model("2 + 3 + 4", "2 * 3 + 3", "It is\n<answer>(2 × 3) + 4 = 10</answer>")
    trajectory = model.play("countdown", PROBLEM)
    assert "2 + 3 + 4 = 9, not 10. Try again." in model.seen[1]
    assert "Use each of 2, 3, 4 exactly once. Try again." in model.seen[2]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    assert trajectory.end is End.DONE and tokens(trajectory) == model.contexts[-1]


def test_countdown_ends_after_last_try() -> None:
    trajectory = Model("1", "2").play("countdown", PROBLEM, {"tries": 2})
    assert trajectory.end is End.DONE and trajectory.total_reward == 0.0


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("I do not know", "Write an arithmetic expression."),
        ("2 ** 3 ** 4", "is not an expression"),
        ("2 / (3 - 3)", "divides by zero"),
        ("(" * 150 + "2", "is not an expression"),
        ("1" * 5000, "Write an arithmetic expression."),
        ("007 + 1", "is not an expression"),
    ],
)
def test_countdown_replies_when_text_is_no_expression(text: str, reply: str) -> None:
    model = Model(text, "4 + 2 * 3")
    assert model.play("countdown", PROBLEM, max_length=20_000).total_reward == 1.0
    assert reply in model.seen[1]


def test_countdown_value_is_exact() -> None:
    assert evaluate("1 / 3 * 3") == (1, [1, 3, 3])


def test_guess_hints_lead_to_number() -> None:
    model = Model("5", "I say 8", "7")
    trajectory = model.play("guess", {"prompt": "guess 1-9=", "number": 7})
    assert "higher, 6-9=" in model.seen[1] and "lower, 6-7=" in model.seen[2]
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([0.1, 0.1, 0.6])
    assert trajectory.end is End.DONE


def test_guess_that_hints_exclude_earns_nothing() -> None:
    model = Model("5", "4", "none", "7")
    trajectory = model.play("guess", {"prompt": "guess 1-9=", "number": 7})
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([0.1, 0, 0, 0.4])
    assert "again, 6-9=" in model.seen[2]


def test_guess_is_worth_more_when_it_ends_earlier() -> None:
    rng = random.Random(0)
    for number in range(1, 10):
        wrong = [str(rng.choice([n for n in range(1, 10) if n != number])) for _ in range(3)]
        totals = [
            Model(*wrong[:turns], str(number))
            .play("guess", {"prompt": "guess 1-9=", "number": number})
            .total_reward
            for turns in range(4)
        ]
        assert totals == sorted(set(totals), reverse=True)


def test_gsm8k_has_calculator_and_checks_answer() -> None:
    row = {"prompt": "6 boxes of 7 eggs?", "answer": "6 * 7 = 42\n#### 42"}
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
    model = Model(call, "There are 42 eggs.")
    trajectory = model.play("gsm8k", row)
    assert '"name": "calculator"' in model.seen[0]
    assert "<tool_response>\n42\n</tool_response>" in model.seen[1]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert Model("41").play("gsm8k", row).total_reward == 0.0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("countdwn", "did you mean 'countdown'"),
        ("verifiers", "did you mean 'verifiers:'"),
        ("gymnasium:", "expected gymnasium:ID"),
        ("nowhere.py:Game", "no file 'nowhere.py'"),
    ],
)
def test_unknown_name_is_reported_early(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_early(load_config(None, [f"rollout.environment={name}"]))


def test_missing_package_is_reported_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[reasoning-gym\]'"):
        check_name("reasoning-gym:x")


def test_unknown_argument_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"has 'higest', .* did you mean 'highest'"):
        Model().play("guess", {}, {"higest": 3})


def test_arguments_without_environment_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"no effect without rollout\.environment"):
        load_config(None, ["rollout.environment_args.size=3"])


def test_every_name_is_listed_and_exists() -> None:
    listed = dict(describe_environments())
    for name in BUILT_IN:
        assert listed[name] and locate(name).load()


def test_environment_brings_rows_for_training_and_evaluation(model: str) -> None:
    chosen = [f"model={model}", "rollout.environment=guess", "rollout.environment_args.size=30"]
    inputs = load_inputs(load_config(None, [*chosen, "evaluation.limit=5"]))
    assert len(inputs.source) == 30  # type: ignore[arg-type]
    assert inputs.held_out is not None and len(inputs.held_out) == 5
    trained, held_out = (
        [row["number"] for _, row in s.rows()] for s in (inputs.source, inputs.held_out)
    )
    assert trained[:5] != held_out
    assert load_inputs(load_config(None, chosen)).held_out is None


def test_environment_with_rows_contradicts_task(model: str) -> None:
    chosen = [f"model={model}", "rollout.environment=guess", "data.task=sort:3"]
    with pytest.raises(ConfigError, match=r"brings its own rows; remove data\.task"):
        load_inputs(load_config(None, chosen))


def test_environment_without_rows_needs_data(model: str) -> None:
    with pytest.raises(ConfigError, match="there are no prompts"):
        load_inputs(load_config(None, [f"model={model}", "rollout.environment=gsm8k"]))


def test_rows_of_file_replace_those_of_environment(model: str, tmp_path: Path) -> None:
    file = tmp_path / "games.jsonl"
    file.write_text('{"prompt": "guess 1-9=", "number": 3}\n')
    chosen = [f"model={model}", "rollout.environment=guess", f"data.path={file}"]
    assert [row["number"] for _, row in load_inputs(load_config(None, chosen)).source.rows()] == [3]
