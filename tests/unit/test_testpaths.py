"""No folder of tests is forgotten: `make test` collects all of them but those that need other packages, which have their own command.
And no command throws away what cannot be made again."""

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_of_tests_is_run_by_one_command_or_the_other() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "testpaths"
    ]
    found = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("tests/*/__init__.py")}
    assert found - set(listed) == {"tests/bench", "tests/megatron", "tests/ray", "tests/vllm"}


def test_make_clean_leaves_runs_alone() -> None:
    does = subprocess.run(
        ["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert ".venv" in does and "runs" not in does
