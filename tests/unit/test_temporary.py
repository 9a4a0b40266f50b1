"""Temporary directories of killed processes are removed; those in use stay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.temporary import TemporaryFolder
from tests.fault_report import Fault


def age(folder: Path) -> Path:
    os.utime(folder, (1, 1))
    return folder


@pytest.mark.fault("A9", "process killed with a temporary directory")
def test_directory_of_killed_process_is_removed_at_next_start(tmp_path: Path, fault: Fault) -> None:
    program = f"""
import os
from pathlib import Path
from paceline.temporary import TemporaryFolder
folder = TemporaryFolder("test-", Path({str(tmp_path)!r}))
(folder.path / "store").write_text("")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    fault.fired()
    age(left)
    with TemporaryFolder("test-", tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
        fault.recovered()
    assert not list(tmp_path.iterdir())


def test_directory_in_use_stays(tmp_path: Path) -> None:
    used = TemporaryFolder("test-", tmp_path)
    age(used.path)
    (tmp_path / "test-new").mkdir()
    os.symlink(tmp_path, tmp_path / "test-link")
    with TemporaryFolder("test-", tmp_path):
        assert used.path.exists() and (tmp_path / "test-new").exists()
    used.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test-link", "test-new"]
