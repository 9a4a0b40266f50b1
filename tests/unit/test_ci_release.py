"""`.ci/release` looks for every supported Python before it builds anything."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_release_check_fails_when_supported_python_is_missing(tmp_path: Path) -> None:
    """3.11 is on PATH; 3.12 is not selected in pyenv but installed; 3.13 is not installed."""
    program(tmp_path / "bin/python3.11", "")
    for name in ("python3.12", "python3.13"):
        program(tmp_path / "bin" / name, "exit 127")
    program(tmp_path / "bin/pyenv", f"echo {tmp_path}/pyenv")
    program(tmp_path / "pyenv/versions/3.12.1/bin/python3.12", "")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONS"}
    command = ["bash", str(ROOT / ".ci/release")]
    done = subprocess.run(
        command, env=environment | {"PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and done.stdout == ""
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["python3.13"]
