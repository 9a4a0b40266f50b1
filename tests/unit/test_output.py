"""Commands whose output is closed, full or without Unicode end with a sentence, not a traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.data.tiny import make_tokenizer
from paceline.model.loading import save_tokenizer
from tests.fault_report import Fault

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


def paceline(*args: str, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "paceline", *args]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, **options)  # type: ignore[call-overload, no-any-return]


@needs_full
@pytest.mark.parametrize("command", ["tasks", "--help"])
@pytest.mark.fault("C1", "standard output full: paceline {command}")
def test_command_says_that_its_output_is_full(command: str, fault: Fault) -> None:
    with FULL.open("w") as full:
        result = paceline(*command.split(), stdout=full)
    assert result.returncode == 1
    fault.fired()
    assert result.stderr.splitlines()[-1] == (
        "error: the output cannot be written: No space left on device"
    )
    assert "Traceback" not in result.stderr and "Exception" not in result.stderr


def test_command_names_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "attempts.jsonl").mkdir()
    result = paceline("export", str(tmp_path))
    assert result.returncode == 10
    assert result.stderr.startswith(f"error: {tmp_path}/attempts.jsonl: Is a directory; check")


@needs_full
def test_error_has_its_exit_code_when_stderr_is_full() -> None:
    with FULL.open("w") as full:
        assert paceline("train", "no such recipe", stdout=full, stderr=full).returncode == 2


def test_listing_ends_quietly_when_its_reader_is_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = paceline("tasks", stdout=writing)
    os.close(writing)
    assert result.returncode == 141 and result.stderr == ""


@pytest.mark.parametrize("command", ["recipes", "--help"])
def test_command_prints_to_output_without_unicode(command: str) -> None:
    result = paceline(command, env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert result.returncode == 0 and result.stdout.isascii() and result.stderr == ""


@needs_full
@pytest.mark.fault("C1", "disk full while the tokenizer is written")
def test_save_tokenizer_raises_os_error_when_disk_is_full(tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "tokenizer.json").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left on device") as raised:
        save_tokenizer(make_tokenizer(), tmp_path)
    fault.fired()
    assert raised.value.errno == errno.ENOSPC
