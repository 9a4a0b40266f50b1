"""The tool `python`: a program that misbehaves ends with its reason, and nothing else is affected.

Environments and functions of the user are contained by workers: test_environment_workers.py.
"""

import asyncio
from pathlib import Path

import pytest

from paceline.environment.tools import OUTPUT_LENGTH, Toolbox
from tests.processes import children
from tests.sandboxes import needs_bubblewrap

PROGRAMS = {
    "hangs": ("import time; print('begun', flush=True); time.sleep(600)", "limit of time"),
    "exits": ("import os; os._exit(3)", "it failed, exit code 3"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "exit code 139"),
    "raises": ("1 / 0", "ZeroDivisionError"),
    "floods": ("while True: print('x' * 1000)", "limit of output"),
    "allocates": ("x = bytearray(10**10)", "MemoryError"),
    "forks": ("import os\nwhile True: os.fork()", "exit code"),
}


@needs_bubblewrap
@pytest.mark.parametrize("name", PROGRAMS)
def test_python_tool_returns_reason_when_program_misbehaves(name: str) -> None:
    before = children()
    program, reason = PROGRAMS[name]
    toolbox = Toolbox(["python"])

    async def both() -> tuple[str, str]:
        return await asyncio.gather(
            toolbox.call("python", {"code": program}), toolbox.call("python", {"code": "print(1)"})
        )

    misbehaved, other = asyncio.run(both())
    assert reason in misbehaved, misbehaved[:300]
    assert len(misbehaved) < OUTPUT_LENGTH + 100
    assert other == "1\n"
    assert children() == before


@needs_bubblewrap
def test_python_tool_cannot_delete_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    code = f"import os, shutil; shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)\n"
    code += f"shutil.rmtree(os.getcwd(), ignore_errors=True); os.remove({str(file)!r})"
    result = asyncio.run(Toolbox(["python"]).call("python", {"code": code}))
    assert "FileNotFoundError" in result or "PermissionError" in result or "Read-only" in result
    assert file.read_text() == "mine"
