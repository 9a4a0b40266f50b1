"""`.ci/run` with a `make` that only prints its target."""

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"test", "test-fast", "test-runs"}  # consist of tiers, or are parts of one
MAKE = """#!/bin/sh
echo "making $1"
if [ "$1" = "$SLOW" ]; then echo $$ > "$PID_FILE"; exec sleep 600; fi
if [ "$1" = "$FAILS" ]; then until [ -z "$SLOW" ] || [ -s "$PID_FILE" ]; do :; done; exit 1; fi
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a directory with the programs that would take time or install packages."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"make": MAKE, "bwrap": "", "chromium": ""}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def ci_run(programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLOW": "", "FAILS": "", **variables}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run([ROOT / ".ci/run"], env=environment, text=True, timeout=120, **output)


def test_ci_run_makes_every_tier(programs: Path) -> None:
    done = ci_run(programs)
    assert done.returncode == 0, done.stdout
    tiers = set(re.findall(r"^(test[a-z-]*|lint):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set(re.findall(r"^== make (\S+): exit code 0", done.stdout, re.MULTILINE))
    assert tiers - OTHERS <= made


def test_workflow_makes_every_tier_of_ci_run(programs: Path) -> None:
    """Its test jobs make test, or the tiers that test consists of."""
    tiers = set(re.findall(r"^== make (test-\S+|lint):", ci_run(programs).stdout, re.MULTILINE))
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    made = {"lint"} if {"run": "make lint"} in jobs["lint"]["steps"] else set()
    made.update(jobs["tier"]["strategy"]["matrix"]["command"])
    for entry in jobs["test"]["strategy"]["matrix"]["include"]:
        made.update(entry["commands"].split())
    if "test" in made:
        made |= {"test-parallel", "test-serial"}
    assert "test-environments" in tiers and tiers <= made


@pytest.mark.parametrize("target", [".venv/.ready", ".venv-trl/.ready", "lint", "test-docs"])
def test_ci_run_fails_and_prints_output_when_target_fails(target: str, programs: Path) -> None:
    done = ci_run(programs, FAILS=target)
    assert done.returncode != 0
    assert f"making {target}\n" in done.stdout and f"make {target}: exit code 1" in done.stdout


def test_ci_run_ends_installation_when_lint_fails(programs: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    slow = {"SLOW": ".venv-vllm/.others", "PID_FILE": str(pid_file)}
    assert ci_run(programs, FAILS="lint", **slow).returncode != 0
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid_file.read_text())).wait(timeout=60)
