"""Reward `python_tests`: what passes, what cannot pass by a trick, and which rows it refuses."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, DataError, RewardError
from paceline.reward.python_tests import code_of, python_tests, row_tests
from paceline.reward.reward import RewardSettings, WeightedReward, check_reward, open_reward
from paceline.sandbox import runner
from tests.sandboxes import needs_bubblewrap
from tests.scoring import in_loop, opened, score

ADD = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'"]
RIGHT = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
DOUBLE = [{"input": "3\n", "output": "6\n"}, {"input": "0", "output": "0"}]

# Each of them would pass if the tests trusted the program.
TRICKS = {
    "exits": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits in the function": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit in the function": "def add(a, b): raise SystemExit(0)",
    "equals everything": """
class Any:
    def __eq__(self, other): return True
    def __repr__(self): return "3"
def add(a, b): return Any()
""",
    "is a list that equals everything": """
class Any(list):
    def __eq__(self, other): return True
def add(a, b): return Any()
""",
    "prints reports": """
import json, os
for fd in range(64):
    for test in range(3):
        try: os.write(fd, json.dumps({"test": test, "values": ["3"]}).encode() + b"\\n")
        except OSError: pass
""",
    "reads the expected value out of the frames": """
import gc, sys
def add(a, b):
    texts = [o for o in gc.get_objects() if isinstance(o, dict) and "tests" in o]
    for frame in iter(lambda f=[sys._getframe()]: f.__setitem__(0, f[0].f_back) or f[0], None):
        texts.append(frame.f_locals)
    return 3 if "== 3" in str(texts) else None
""",
    "redefines what reports": """
import builtins, json, os
builtins.repr = lambda value: "3"
json.dumps = lambda value: '{"test": 0, "values": ["3"]}'
def add(a, b): return None
""",
}


@needs_bubblewrap
@pytest.mark.parametrize(
    ("completion", "tests", "passed"),
    [
        (RIGHT, ADD, 1.0),
        ("def add(a, b): return a + b", ADD, 1.0),
        ("```\ndef add(a, b): return 3\n```", ADD, 1 / 3),
        ("def add(a, b): return sum((a, b))", ADD, 1 / 3),
        ("this is no Python", ADD, 0.0),
        ("", ADD, 0.0),
        ("from numpy import int64\ndef add(a, b): return int64(a + b)", ADD[0], 1.0),
        ("def add(a, b): return a + b", "x = add(1, 1)\nassert x == 2\nassert 4 == x * 2", 1.0),
        ("def add(a, b): return a + b", "x = add(1, 1)\nassert x == 2\nassert 5 == x * 2", 0.0),
        ("def add(a, b): return a - b", "import math\nassert math.isclose(add(1, 1), 2)", 0.0),
        ("def add(a, b): return a + b", "import math\nassert math.isclose(add(1, 1), 2)", 1.0),
        ("def add(a, b): return a + b; print('x' * 10**7)", ADD, 1.0),
        ("print(int(input()) * 2)", DOUBLE, 1.0),
        ("print(6)", DOUBLE, 0.5),
        ("print(6); 1 / 0", DOUBLE, 0.0),
    ],
)
def test_share_of_passed_tests(completion: str, tests: Any, passed: float) -> None:
    found = python_tests(completion, {"tests": tests})
    assert found == {"reward": float(passed == 1.0), "passed": pytest.approx(passed)}


@needs_bubblewrap
@pytest.mark.parametrize("name", TRICKS)
def test_program_cannot_pass_by_a_trick(name: str) -> None:
    found = python_tests(
        TRICKS[name], {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
    )
    assert found["reward"] == 0.0


@needs_bubblewrap
def test_last_code_block_counts_and_runs_without_its_main_part() -> None:
    main = "if __name__ == '__main__':\n    add(int(input()), 1)\n"
    better = f"```py\ndef add(a, b): return a + b\n{main}```"
    completion = f"```python\ndef add(a, b): return 0\n```\nBetter:\n{better}"
    assert python_tests(completion, {"tests": ADD})["reward"] == 1.0


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("a\n```python\nx = 1\n```\n", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("use `x = 1`", "use `x = 1`"),
        ("1.\n   ```\n   x\n   ```", "   x\n"),
    ],
)
def test_code_of_completion(completion: str, code: str) -> None:
    assert code_of(completion) == code


def test_tests_may_be_the_answer_column() -> None:
    assert row_tests({"answer": ["assert True"]}) == ["assert True"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "x", "code": "y"}, r"no 'tests', but 'prompt', 'code'; set data\.answer_key"),
        ({"tests": []}, "empty list of tests"),
        ({"tests": ["assert ="]}, "is not valid Python"),
        ({"tests": [3]}, "3 is int; expected Python code, or a dict"),
        ({"tests": {"input": "3"}}, "expected Python code, or a dict with 'input' and 'output'"),
    ],
)
def test_row_that_cannot_be_tested_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        row_tests(row)


@needs_bubblewrap
@in_loop
async def test_pool_keeps_its_processes_when_programs_hang_or_crash() -> None:
    async with opened(f"{__file__}:impatient", workers=2) as reward:
        before = reward.pids
        programs = [
            "while True: pass",
            "import os; os.kill(os.getppid(), 9)",
            "import os; os.abort()",
        ]
        programs += ["x = [0] * 10**10", "import os\nwhile True: os.fork()", RIGHT]
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(score(reward, text, tests=ADD) for text in programs))
        assert [values[0]["reward"] for values in found] == [0, 0, 0, 0, 0, 1]  # type: ignore[index]
        assert reward.pids == before


@needs_bubblewrap
@in_loop
async def test_rows_are_checked_before_the_run() -> None:
    reward = await open_reward(RewardSettings(function=("python_tests", "exact")), task=None)
    assert isinstance(reward, WeightedReward)
    try:
        reward.check([("a.jsonl:1", {"answer": "assert True"})])
        with pytest.raises(DataError, match=r"a\.jsonl:2 cannot be scored .*no 'tests'"):
            reward.check([("a.jsonl:2", {"prompt": "x"})])
    finally:
        await reward.close()


@in_loop
async def test_missing_bubblewrap_is_reported_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_find", lambda: "bubblewrap is not installed")
    with pytest.raises(ConfigError, match="needs a sandbox, but bubblewrap is not installed"):
        check_reward(RewardSettings(function="python_tests"))
    with pytest.raises(ConfigError, match=r"set reward\.allow_weak_sandbox=true"):
        await open_reward(RewardSettings(), None, "python_tests")
    check_reward(RewardSettings(function="python_tests", allow_weak_sandbox=True))


@in_loop
async def test_weak_sandbox_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without bubblewrap, also for the reward process
    monkeypatch.setattr(runner, "_find", runner._find.__wrapped__)
    async with opened("python_tests", allow_weak_sandbox=True) as reward:
        (found,) = await score(reward, RIGHT, tests=ADD)
        assert found == {"reward": 1.0, "passed": 1.0}


@in_loop
async def test_failing_sandbox_is_an_error_and_no_score(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho bwrap: broken >&2; exit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    async with opened(f"{__file__}:untested") as reward:
        with pytest.raises(RewardError, match=r"bubblewrap cannot make a sandbox.*bwrap: broken"):
            await score(reward, RIGHT, tests=ADD)


def untested(completion: str, row: dict[str, Any]) -> dict[str, float]:
    return python_tests(completion, row)


def impatient(completion: str, row: dict[str, Any]) -> dict[str, float]:
    """Give up soon on programs that hang, but not on others when the machine is slow."""
    os.environ["PACELINE_REWARD_TIMEOUT_S"] = "1" if "while" in completion else "15"
    return python_tests(completion, row)
