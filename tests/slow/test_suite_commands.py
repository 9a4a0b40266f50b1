"""The test guide's commands from the outside: the end-to-end one holds on this machine, and what cannot be is refused in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


OURS = ("PYTHON", "MODEL_ID", "MODEL_PATH", "ACTOR_STRATEGY", "ENGINE", "CLUSTER")


def command(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {key: value for key, value in os.environ.items() if key not in OURS} | {
        "VIRTUAL_ENV": sys.prefix,
        "NUM_GPUS": "0",
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(
        [str(ROOT / name)], env=known | environment, text=True, timeout=280, **output
    )


@pytest.mark.slow
def test_every_check_of_the_end_to_end_command_holds() -> None:
    done = command("run_e2e_test.sh")
    assert (
        done.returncode == 0 and "all 10 checks hold" in done.stdout and "FAIL" not in done.stdout
    ), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run_e2e_test.sh", "run_benchmark.sh"])
def test_a_strategy_that_does_not_exist_is_refused(name: str) -> None:
    done = command(name, ACTOR_STRATEGY="zero3")
    assert (
        done.returncode == 2
        and "ACTOR_STRATEGY=zero3 is not known; use one of single, fsdp2, megatron" in done.stdout
    ), done.stdout


@pytest.mark.slow
def test_a_python_that_is_named_is_used_as_it_is_or_refused() -> None:
    done = command("run_e2e_test.sh", PYTHON=sys.executable, ACTOR_STRATEGY="zero3")
    assert done.returncode == 2 and "zero3 is not known" in done.stdout, (
        "it came as far as reading the environment"
    )
    assert (
        "PYTHON=no-such-python does not run"
        in command("run_e2e_test.sh", PYTHON="no-such-python").stdout
    )
