"""Reward `python_tests`: what passes, what cannot pass by a trick, and which rows it rejects."""

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
    "sends replies before it is called": """
import os
for fd in range(3, 64):
    for reply in ("x", "[]", "{}", '{"value": true, "args": [null, null]}', '{"found": []}'):
        try: os.write(fd, reply.encode() + b"\\n")
        except OSError: pass
""",
    "prints reports": """
import os
for fd in range(64):
    for test in range(3):
        try: os.write(fd, b"%d\\n" % test)
        except OSError: pass
""",
    "returns the object of the test": """
def add(a, b): return __import__("sys").modules["__main__"].Remote
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
def test_reward_is_1_only_when_all_tests_pass(completion: str, tests: Any, passed: float) -> None:
    found = python_tests(completion, {"tests": tests})
    assert found == {"reward": float(passed == 1.0), "passed": pytest.approx(passed)}


EQUAL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __len__(self): return 0
    def __getattr__(self, name): return lambda *args: True
"""
HUMAN_EVAL = "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"
UNITTEST = """
import unittest
class Tests(unittest.TestCase):
    def test_f(self):
        self.assertEqual(f(1), 2)
        self.assertTrue(f(1) > 1)
"""
# Solutions that are wrong, and tests that they passed when they ran in the process of the tests.
FORGED = {
    "object in check": (f"{EQUAL}\ndef f(x): return Any()", HUMAN_EVAL),
    "object in unittest": (f"{EQUAL}\ndef f(x): return Any()", UNITTEST),
    "object in unittest.main": (f"{EQUAL}\ndef f(x): return Any()", f"{UNITTEST}\nunittest.main()"),
    "ignored result of unittest": (
        "def f(x): return 0",
        f"{UNITTEST}\nunittest.main(exit=False)",
    ),
    "changed math": (
        "import math\nmath.isclose = lambda *args: True\ndef f(x): return 0",
        "import math\nassert math.isclose(f(1), 2)",
    ),
    "changed math that the test does not import": (
        "import math\nmath.isclose = lambda *args: True\ndef f(x): return 0",
        "assert math.isclose(f(1), 2)",
    ),
    "changed built-in function": (
        "import builtins\nbuiltins.abs = abs = lambda x: 0\ndef f(x): return 0",
        "assert abs(f(1) - 2) < 1e-6",
    ),
    "method of an object": (f"{EQUAL}\ndef f(x): return Any()", "assert f(1).startswith('2')"),
    "end of a loop": ("def f(x): raise StopIteration", "assert all(map(f, [1]))"),
    "empty result": ("def f(x): return []", "for a, b in zip(f(1), [2]):\n    assert a == b"),
    "exit instead of an exception": (
        "import os\ndef f(x): os._exit(0)",
        "try:\n    f(1)\nexcept:\n    assert True",
    ),
    "exit in the middle of unittest": (
        "def f(x): raise SystemExit(0)",
        f"{UNITTEST}\nunittest.main()",
    ),
    "report with the nonce of a caller": (
        """
import os, sys
frame = sys._getframe()
while frame:
    if nonce := frame.f_locals.get("nonce"):
        report = b'%s {"test": 0, "values": []}' % nonce.encode()
        os.write(frame.f_locals["report"], report + bytes([10]))
    frame = frame.f_back
def f(x): return 0
""",
        HUMAN_EVAL,
    ),
}
# Right solutions, and tests that need more than a comparison with a literal.
OBJECTS = {
    "check": ("def f(x): return x + 1", HUMAN_EVAL),
    "unittest": ("def f(x): return x + 1", UNITTEST),
    "unittest.main": ("def f(x): return x + 1", f"{UNITTEST}\nunittest.main()"),
    "test function": ("def f(x): return x + 1", "def test_f():\n    assert f(1) == 2"),
    "module": ("def f(x): return x + 1", "assert math.isclose(f(1), 2)"),
    "class": (
        "class Solution:\n    def twoSum(self, a, b): return a + b",
        "assert Solution().twoSum(1, b=2) == 3",
    ),
    "state": (
        "class Stack:\n    size = 0\n    def push(self, x): self.size += 1",
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s.size == 2",
    ),
    "function with a capital letter": (
        "def Split(x): return [n for n in x if n % 2]",
        "assert Split([1, 2, 3]) == [1, 3]",
    ),
    "class that is a dict": (
        "class Cache(dict):\n    def store(self, x): self[x] = x\n"
        "    def count(self): return len(self)",
        "c = Cache()\nc.store(1)\nassert c.count() == len(c) == 1",
    ),
    "attribute that the test assigns": (
        "class Node:\n    def __init__(self, x): self.x, self.left = x, None\n"
        "def height(node): return 1 + height(node.left) if node else 0",
        "root = Node(1)\nroot.left = Node(2)\nassert root\nassert height(root) == 2",
    ),
    "change in place of a named argument": (
        "class Solution:\n    def turn(self, nums): nums.reverse()",
        "x = [1, 2]\nSolution().turn(nums=x)\nassert x == [2, 1]",
    ),
    "views of a dict": (
        "def f(x): return {n: -n for n in range(x)}.keys()\n"
        "def g(x): return {n: -n for n in range(x)}.values()\n"
        "def h(x): return {n: [n] for n in range(x)}.items()",
        "assert f(2) == {0, 1} and sorted(f(2)) == [0, 1] and f(2) != [0, 1]\n"
        "assert list(g(2)) == [0, -1] and list(h(2)) == [(0, [0]), (1, [1])]",
    ),
    "deque": (
        "from collections import deque\ndef f(x): return deque(range(x))",
        "assert list(f(3)) == [0, 1, 2] and f(3) != [0, 1, 2]",
    ),
    "exception that is derived from another": (
        "class BankError(Exception): pass\nclass AccountLocked(BankError): pass\n"
        "def f(x): raise AccountLocked('x')",
        "try:\n    f(1)\nexcept BankError as e:\n    assert isinstance(e, AccountLocked)",
    ),
    "object as argument": (
        "class Node:\n    def __init__(self, x): self.x = x\ndef f(node): return node.x",
        "assert f(Node(3)) == 3",
    ),
    "change in place": (
        "def f(x):\n    x.sort()",
        "values = [[2], [1]]\nassert f(values) is None\nassert values == [[1], [2]]",
    ),
    "exception": (
        "def f(x): raise ValueError('negative')",
        "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert 'nega' in str(e)",
    ),
    "exception of the solution": (
        "class Empty(LookupError): pass\ndef f(x): raise Empty('x')",
        "try:\n    f(1)\nexcept Empty as e:\n    assert isinstance(e, LookupError)",
    ),
    "types": (
        "def f(x): return x",
        "for x in (1 << 9999, 1.5, float('inf'), 1j, 'ü', b'\\xff', None, True, [1, (2,)], {3},"
        " frozenset({4}), {(5,): [6]}, range(3)):\n"
        "    assert f(x) == x and type(f(x)) is type(x)",
    ),
    "generator": ("def f(x): yield from range(x)", "assert list(f(3)) == [0, 1, 2]"),
    "name of a built-in function": ("def sum(a, b): return a * b", "assert sum(2, 3) == 6"),
    "only a value": ("x = 42", "assert x == 42"),
    "value": ("LIMIT = 3\ndef f(x): return LIMIT", "assert f(1) == LIMIT"),
    "nothing that a loop checks": ("def f(x): return []", "assert [x for x in f(1)] == []"),
}


@needs_bubblewrap
@pytest.mark.parametrize("name", FORGED)
def test_wrong_solution_does_not_pass_by_forgery(name: str) -> None:
    code, test = FORGED[name]
    assert python_tests(code, {"tests": test}) == {"reward": 0.0, "passed": 0.0}


@needs_bubblewrap
@pytest.mark.parametrize("name", OBJECTS)
def test_right_solution_passes_from_another_process(name: str) -> None:
    code, test = OBJECTS[name]
    assert python_tests(code, {"tests": test}) == {"reward": 1.0, "passed": 1.0}


@needs_bubblewrap
@pytest.mark.parametrize("name", TRICKS)
def test_program_cannot_pass_by_trick(name: str) -> None:
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
def test_code_is_last_block_or_whole_completion(completion: str, code: str) -> None:
    assert code_of(completion) == code


@pytest.mark.parametrize("row", [{}, {"tests": None}], ids=["no tests", "tests are null"])
def test_tests_may_be_answer_column(row: dict[str, Any]) -> None:
    assert row_tests(row | {"answer": ["assert f()"]}) == ["assert f()"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "x", "code": "y"}, r"no 'tests', but 'prompt', 'code'; set data\.answer_key"),
        ({"prompt": "x", "tests": None}, "no 'tests', but 'prompt'; set"),
        ({"tests": []}, "empty list of tests"),
        ({"tests": ["assert ="]}, "is not valid Python"),
        ({"tests": [f"assert f({'-' * 20000}1)"]}, "is not valid Python: too deeply nested"),
        ({"tests": [f"assert f({'1+' * 20000}1)"]}, "is not valid Python: maximum recursion"),
        ({"tests": ["assert True"]}, "uses nothing of the solution; expected a call of it"),
        ({"tests": ["def check(f):\n    assert f(1) == 2"]}, "uses nothing of the solution"),
        ({"tests": [3]}, "3 is int; expected Python code, or a dict"),
        ({"tests": {"input": "3"}}, "expected Python code, or a dict with 'input' and 'output'"),
        ({"tests": {"input": 3, "output": "9"}}, "a dict with 'input' and 'output' as text"),
    ],
)
def test_row_that_cannot_be_tested_is_rejected(row: dict[str, Any], problem: str) -> None:
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
async def test_rows_are_checked_before_run() -> None:
    reward = await open_reward(RewardSettings(function=("python_tests", "exact")), task=None)
    assert isinstance(reward, WeightedReward)
    try:
        reward.check([("a.jsonl:1", {"answer": "assert f()"})])
        with pytest.raises(DataError, match=r"a\.jsonl:2 cannot be scored .*no 'tests'"):
            reward.check([("a.jsonl:2", {"prompt": "x"})])
    finally:
        await reward.close()


@in_loop
async def test_missing_bubblewrap_is_reported_before_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_find", lambda: "bubblewrap is not installed")
    with pytest.raises(ConfigError, match="needs a sandbox, but bubblewrap is not installed"):
        check_reward(RewardSettings(function="python_tests"))
    with pytest.raises(ConfigError, match=r"set reward\.allow_weak_sandbox=true"):
        await open_reward(RewardSettings(), None, "python_tests")
    check_reward(RewardSettings(function="python_tests", allow_weak_sandbox=True))


@in_loop
async def test_weak_sandbox_is_used_when_setting_allows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without bubblewrap, also for the reward process
    monkeypatch.setattr(runner, "_find", runner._find.__wrapped__)
    async with opened("python_tests", allow_weak_sandbox=True) as reward:
        (found,) = await score(reward, RIGHT, tests=ADD)
        assert found == {"reward": 1.0, "passed": 1.0}


@in_loop
async def test_failing_sandbox_is_error_and_no_score(
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
