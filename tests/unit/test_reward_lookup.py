"""Early check of reward names: typos are found without imports and without running user code."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.reward.reward import RewardSettings, check_reward


def check(*functions: str) -> None:
    check_reward(RewardSettings(function=functions))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no/such/file.py:f", r"no file 'no/such/file\.py' \(relative paths start at "),
        ("{file}:goood", r"no 'goood' in .*my_rewards\.py; it defines good, .* mean 'good'"),
        ("no_such_module:f", "no module 'no_such_module'; searched "),
        ("json.no_such_module:f", "no module 'json.no_such_module'; searched "),
        ("paceline.reward.verify:exactly", r"no 'exactly' in .*verify\.py; .* mean 'exact'"),
        ("colorsys:rgb_to_hsw", r"no 'rgb_to_hsw' in .*colorsys\.py; .* mean 'rgb_to_hsv'"),
        ("exactly", "neither a verifier nor a task nor an entry point .*did you mean 'exact'"),
        ("sort:999", "task 'sort:999': expected a difficulty from 1 to 64"),
        ("{wrong}:f", r"importing it raised SyntaxError: .* \(.*wrong\.py:2\)"),
    ],
)
def test_check_reward_raises_when_name_does_not_exist(
    functions: Path, function: str, message: str
) -> None:
    wrong = functions.with_name("wrong.py")
    wrong.write_text("import os\ndef f(completion, row:\n")
    with pytest.raises(ConfigError, match=message):
        check("exact", function.format(file=functions, wrong=wrong))


@pytest.mark.parametrize(
    "function", ["exact", "regex", "sort", "sort:3", "json:dumps", "os.path:join"]
)
def test_check_reward_accepts_names_that_exist(function: str) -> None:
    check(function)


@pytest.mark.parametrize(
    "source",
    [
        "def f(c, r): raise SystemExit",
        "async def f(c, r): ...",
        "class f: ...",
        "f = print",
        "f: object = print",
        "from os import path as f",
        "import f.g",
        "from os import *",
        "if True:\n    try:\n        def f(): ...\n    except ImportError: ...",
        "def set():\n    global f\n    f = 1",
        "def __getattr__(name): return print",
        "(f := print)",
    ],
)
def test_check_reward_accepts_every_way_to_define_function(tmp_path: Path, source: str) -> None:
    (tmp_path / "rewards.py").write_text(source)
    check(f"{tmp_path}/rewards.py:f")


def test_check_reward_runs_no_code_of_file(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def f(c, r): ...\nraise SystemExit(1)")
    check(f"{tmp_path}/rewards.py:f", f"{tmp_path}/rewards.py:f.g")


def test_check_reward_imports_no_torch() -> None:
    program = (
        "import sys; from paceline.reward.reward import RewardSettings, check_reward;"
        "check_reward(RewardSettings(function=('exact', 'torch:sum')));"
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
