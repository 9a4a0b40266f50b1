"""Version, commit and backends of an installation."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from paceline.version import BACKENDS, describe

PACKAGE = Path(__file__).parents[2] / "paceline"


def run(code: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_version_lists_commit_and_backends() -> None:
    version, commit, *backends = describe()
    assert version.startswith("paceline ") and re.match(r"commit \S+", commit)
    assert [line.split()[0] for line in backends] == list(BACKENDS)
    assert backends[0].startswith(f"torch {torch.__version__} (")


def test_version_imports_no_backend() -> None:
    modules = run(
        "import sys; from paceline.version import describe; describe(); print([*sys.modules])"
    )
    assert not {"torch", "transformers", "ray", "vllm"} & set(re.findall(r"'(\w+)'", modules))


def test_version_is_unknown_when_package_is_plain_copy(tmp_path: Path) -> None:
    (tmp_path / "paceline").mkdir()
    for name in ("__init__.py", "version.py"):
        shutil.copy(PACKAGE / name, tmp_path / "paceline")
    show = "from paceline.version import describe; print(describe()[:2])"
    # -I -S: without the packages of this environment
    shown = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {show}", "-I", "-S")
    assert shown == "['paceline 0.0.0+unknown', 'commit unknown: not built from a git clone']"


def test_commit_is_that_of_clone_when_package_is_in_one(tmp_path: Path) -> None:
    (tmp_path / "paceline").mkdir()
    for name in ("__init__.py", "version.py"):
        shutil.copy(PACKAGE / name, tmp_path / "paceline")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    head = ["git", "rev-parse", "HEAD"]
    expected = subprocess.run(head, cwd=tmp_path, capture_output=True, text=True).stdout
    show = "from paceline.version import commit; print(commit())"
    found = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {show}")
    assert expected.startswith(found) and len(found) >= 7
