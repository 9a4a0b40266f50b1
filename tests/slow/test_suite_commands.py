"""run_e2e_test.sh and run_benchmark.sh, started as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("PYTHON", "MODEL_ID", "MODEL_PATH", "ACTOR_STRATEGY", "ENGINE", "CLUSTER")


def command(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {key: value for key, value in os.environ.items() if key not in VARIABLES} | {
        "VIRTUAL_ENV": sys.prefix,
        "NUM_GPUS": "0",
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(
        [str(ROOT / name)], env=known | environment, text=True, timeout=280, **output
    )


def test_e2e_command_passes_every_check() -> None:
    done = command("run_e2e_test.sh")
    assert done.returncode == 0, done.stdout
    assert "all 10 checks passed" in done.stdout and "FAIL" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("name", "python"),
    [("run_benchmark.sh", {}), ("run_e2e_test.sh", {"PYTHON": sys.executable})],
    ids=["benchmark", "e2e with PYTHON"],
)
def test_command_exits_with_2_when_strategy_is_unknown(name: str, python: dict[str, str]) -> None:
    done = command(name, ACTOR_STRATEGY="zero3", **python)
    # the error shows that the interpreter ran as far as reading the environment
    message = "ACTOR_STRATEGY=zero3: expected one of single, fsdp2, megatron"
    assert done.returncode == 2 and message in done.stdout, done.stdout


def test_command_reports_python_when_it_does_not_run() -> None:
    done = command("run_e2e_test.sh", PYTHON="no-such-python")
    assert "PYTHON=no-such-python does not run" in done.stdout, done.stdout
