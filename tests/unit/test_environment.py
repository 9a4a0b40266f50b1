"""Agent loops: single turn, custom loops, and errors that name the loop and the prompt."""

import asyncio
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.custom_environment import TwoTries
from paceline.data.prompts import DataSettings
from paceline.data.tiny import make_tokenizer
from paceline.environment.conversation import Limits
from paceline.errors import ConfigError, RolloutError
from paceline.rollout.environment import open_environment
from paceline.types import Completion, Finish, Prompt, Trajectory, Turn
from tests.fault_report import Fault

TOKENIZER = make_tokenizer()
DATA, LIMITS = DataSettings(task="reverse:3"), Limits(4, 100, 30.0)
PROMPT = Prompt("q", tuple(TOKENIZER.encode("2+2=")), "2+2=", {"prompt": "2+2=", "answer": "4"})


def run(make: Any, *completions: str, tokenizer: Any = TOKENIZER) -> Trajectory:
    """Generate one trajectory with a model that returns these completions."""
    waiting = list(completions)

    async def generate(context: tuple[int, ...]) -> Completion:
        tokens = np.array(tokenizer.encode(waiting.pop(0), add_special_tokens=False), np.int32)
        return Completion(
            tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), Finish.STOP
        )

    made = asyncio.run(open_environment(make, tokenizer, DATA, LIMITS).run(PROMPT, generate))
    assert isinstance(made, Trajectory)
    return made


def test_default_environment_has_one_turn() -> None:
    assert [len(turn.prompt) for turn in run(None, "4").turns] == [len(PROMPT.tokens)]


def test_text_excludes_end_token_that_is_not_marked_special() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=False)
    ended = run(None, "4<|im_end|>", tokenizer=tokenizer)
    assert ended.text == "4" and ended.num_tokens == 2


def test_example_environment_retries_and_returns_last_completion() -> None:
    assert len(run(TwoTries, "4").turns) == 1
    twice = run("examples/custom_environment.py:TwoTries", "5", "4")
    assert twice.text == "4" and TOKENIZER.decode(twice.turns[1].prompt) == "\nno, 2+2="


class Raising:
    def __init__(self, tokenizer: Any) -> None: ...

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        return prompt.row["no such column"]


class Exiting(Raising):
    async def run(self, prompt: Prompt, generate: Any) -> Any:
        sys.exit(0)


class Nothing(Raising):
    async def run(self, prompt: Prompt, generate: Any) -> Any:
        return None


class Forgetful(Raising):
    """Omits the first completion from the second context, but not from the trajectory."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        first = await generate(prompt.tokens)
        second = await generate((*prompt.tokens, 5))
        return Trajectory((Turn(prompt.tokens, first), Turn((5,), second)), "")


class NotANumber(Raising):
    """Gives a turn the reward NaN."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        return Trajectory(
            (Turn(prompt.tokens, await generate(prompt.tokens), reward=float("nan")),), ""
        )


class Huge(Raising):
    """Gives a turn a reward that is infinite in float32."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        return Trajectory(
            (Turn(prompt.tokens, await generate(prompt.tokens), reward=-1.7e308),), ""
        )


class Restarting(Raising):
    """Begins the second turn with a new context."""

    prompt = (5, 6)

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        first, second = await generate(prompt.tokens), await generate((5, 6))
        turns = (Turn(prompt.tokens, first), Turn(self.prompt, second, restarts=True))
        return Trajectory(turns, "")


class RestartingElsewhere(Restarting):
    prompt = (5,)


class Together(Raising):
    """Two agents generate at the same time, and one of them asks for nothing."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        async with asyncio.TaskGroup() as agents:
            agents.create_task(generate(prompt.tokens))
            agents.create_task(self.fail())

    async def fail(self) -> None:
        raise self.error

    error: Exception = KeyError("no such column")


class Aborted(Together):
    error = RolloutError("the completion was aborted")


class Twice(Raising):
    """Has two agents with the same completion."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        turns = (Turn(prompt.tokens, await generate(prompt.tokens)),)
        return (Trajectory(turns, "", agent="a"), Trajectory(turns, "", agent="b"))


class Empty(Raising):
    async def run(self, prompt: Prompt, generate: Any) -> Any:
        return ()


def test_turn_that_restarts_begins_new_row() -> None:
    trajectory = run(Restarting, "5", "4")
    assert [row[0].prompt for row in trajectory.rows] == [PROMPT.tokens, (5, 6)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            RestartingElsewhere,
            r"turn 2 does not match a call of generate\(\); the prompt of a turn that restarts",
        ),
        (Twice, r"agent 'b', turn 1 does not match a call of generate\(\)"),
        (Empty, "returned no Trajectory; expected at least one"),
        (Together, r"Together, .* raised KeyError: 'no such column' \(.*test_environment.py:\d+\)"),
        (Aborted, "^the completion was aborted$"),
        (
            Raising,
            r"environment Raising, prompt 'q': raised KeyError: 'no such column' "
            r"\(.*test_environment.py:\d+\)",
        ),
        (Exiting, r"environment Exiting, prompt 'q': raised SystemExit: 0 "),
        (Nothing, "returned None; expected a Trajectory"),
        (Forgetful, r"turn 2 does not match a call of generate\(\)"),
        (NotANumber, "turn 1 has the reward nan; expected a finite number"),
        (Huge, r"turn 1 has the reward -1.7e\+308; expected a finite number of at most 1e\+18"),
    ],
)
@pytest.mark.fault("D2", "bad environment: {make.__name__}")
def test_failure_names_environment_and_prompt(make: Any, message: str, fault: Fault) -> None:
    with pytest.raises(RolloutError, match=message):
        run(make, "5", "4")
    fault.fired()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Incomplete", "has neither `async def step.*` nor `async def run"),
        ("TwoArguments", "creating it raised TypeError: .*'tools'"),
        ("None", "no 'None' in"),
    ],
)
def test_open_environment_rejects_invalid_class(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "custom.py").write_text(
        textwrap.dedent("""
        class Incomplete:
            def __init__(self, tokenizer): pass
        class TwoArguments:
            def __init__(self, tokenizer, tools): pass
    """)
    )
    with pytest.raises(
        ConfigError, match=rf"rollout\.environment = '.*custom\.py:{name}'.*{message}"
    ):
        open_environment(f"{tmp_path}/custom.py:{name}", TOKENIZER, DATA, LIMITS)
