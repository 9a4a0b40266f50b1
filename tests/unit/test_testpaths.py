"""Makefile and pytest settings: every test directory has a command, and `make clean` keeps runs.

`make test` collects all directories except those that need other packages.
"""

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_directory_has_a_command() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = pyproject["tool"]["pytest"]["ini_options"]["testpaths"]
    found = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("tests/*/__init__.py")}
    assert found - set(listed) == {"tests/bench", "tests/megatron", "tests/ray", "tests/vllm"}


def test_make_clean_keeps_runs() -> None:
    dry_run = ["make", "-n", "clean"]
    output = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv" in output and "runs" not in output
