"""An agent loop of one's own: its turns become a trajectory, and its mistakes have names."""

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.custom_environment import TwoTries
from paceline.data.tiny import make_tokenizer
from paceline.errors import ConfigError, RolloutError
from paceline.rollout.environment import open_environment
from paceline.types import Completion, Finish, Prompt, Trajectory, Turn

TOKENIZER = make_tokenizer()
PROMPT = Prompt("q", tuple(TOKENIZER.encode("2+2=")), "2+2=", {"prompt": "2+2=", "answer": "4"})


def attempt(make: Any, *answers: str) -> Trajectory:
    """One attempt with a model that gives these answers."""
    waiting = list(answers)

    async def generate(context: tuple[int, ...]) -> Completion:
        tokens = np.array(TOKENIZER.encode(waiting.pop(0), add_special_tokens=False), np.int32)
        return Completion(
            tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), Finish.STOP
        )

    return asyncio.run(open_environment(make, TOKENIZER).run(PROMPT, generate))


def test_without_one_there_is_one_turn() -> None:
    assert [len(turn.prompt) for turn in attempt(None, "4").turns] == [len(PROMPT.tokens)]


def test_the_token_that_ends_an_answer_is_no_part_of_its_text_whether_the_tokenizer_calls_it_special_or_not() -> (
    None
):
    TOKENIZER.add_tokens(["<|im_end|>"], special_tokens=False)
    ended = attempt(None, "4<|im_end|>")
    assert ended.text == "4" and ended.num_tokens == 2


def test_the_example_tries_again_and_its_last_word_counts() -> None:
    assert len(attempt(TwoTries, "4").turns) == 1
    twice = attempt("examples/custom_environment.py:TwoTries", "5", "4")
    assert twice.text == "4" and TOKENIZER.decode(twice.turns[1].prompt) == "\nno, 2+2="


class Raising:
    def __init__(self, tokenizer: Any) -> None: ...

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        return prompt.row["no such column"]


class Nothing(Raising):
    async def run(self, prompt: Prompt, generate: Any) -> Any:
        return None


class Forgetful(Raising):
    """Leaves out of the second question what the first answer was, but not out of the trajectory."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        first = await generate(prompt.tokens)
        second = await generate((*prompt.tokens, 5))
        return Trajectory((Turn(prompt.tokens, first), Turn((5,), second)), "")


class Dreamer(Raising):
    """Divides by what it does not know."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        return Trajectory(
            (Turn(prompt.tokens, await generate(prompt.tokens), reward=float("nan")),), ""
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Raising,
            r"environment Raising, prompt 'q': raised KeyError: 'no such column' \(.*test_environment.py:\d+\)",
        ),
        (Nothing, "returned None; expected a Trajectory"),
        (Forgetful, "turn 2 is not what was generated"),
        (Dreamer, "turn 1 has the reward nan; expected a finite number"),
    ],
)
def test_what_goes_wrong_in_it_is_told_with_its_name_and_prompt(make: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        attempt(make, "5", "4")


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        textwrap.dedent("""
        class Half:
            def __init__(self, tokenizer): pass
        class Dear:
            def __init__(self, tokenizer, tools): pass
    """)
    )
    for name, message in {
        "Half": "has no method `async def run",
        "Dear": "making it raised TypeError: .*'tools'",
        "None": "no 'None' in",
    }.items():
        with pytest.raises(
            ConfigError, match=rf"rollout\.environment = '.*own\.py:{name}'.*{message}"
        ):
            open_environment(f"{tmp_path}/own.py:{name}", TOKENIZER)
