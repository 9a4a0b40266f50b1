"""Lineage: a checkpoint that a later attempt left behind is never resumed from."""

import asyncio
from pathlib import Path

import pytest

from paceline.auditor.checkpoints import read_checkpoints
from paceline.auditor.report import AuditReport
from paceline.errors import CheckpointError
from paceline.line_file import read_lines
from paceline.training.checkpoint import latest_checkpoint, save_checkpoint
from paceline.training.lineage import FILE, Lineage, begin_attempt
from tests.fault_report import Fault
from tests.files import rewrite


def save(run_dir: Path, step: int, attempt: str | None) -> Path:
    async def write(folder: Path) -> None:
        (folder / "weights").write_text(f"{attempt} {step}")

    state = {"step": step} | ({"attempt": attempt} if attempt else {})
    return asyncio.run(save_checkpoint(run_dir / "checkpoints", step, state, write, keep=9))


def newest(run_dir: Path) -> str | None:
    folder = latest_checkpoint(run_dir / "checkpoints")
    return (folder / "weights").read_text() if folder else None


@pytest.mark.fault("E4", "checkpoint of an abandoned future")
def test_checkpoint_beyond_start_of_later_attempt_is_rejected(tmp_path: Path, fault: Fault) -> None:
    first = begin_attempt(tmp_path, 0)
    save(tmp_path, 10, first)
    abandoned = save(tmp_path, 20, first)
    second = begin_attempt(tmp_path, 10)
    fault.fired()
    assert newest(tmp_path) == f"{first} 10"
    with pytest.raises(CheckpointError, match="abandoned future: the run continued from step 10"):
        Lineage(tmp_path).check(abandoned, {"step": 20, "attempt": first})
    save(tmp_path, 15, second)
    assert newest(tmp_path) == f"{second} 15"
    save(tmp_path, 20, second)
    assert newest(tmp_path) == f"{second} 20"


def test_checkpoint_stays_valid_when_later_attempts_continue_from_it(tmp_path: Path) -> None:
    first = begin_attempt(tmp_path, 0)
    save(tmp_path, 10, first)
    for _ in range(3):
        begin_attempt(tmp_path, 10)
    assert newest(tmp_path) == f"{first} 10"


def test_checkpoint_without_attempt_is_valid(tmp_path: Path) -> None:
    save(tmp_path, 10, None)
    assert newest(tmp_path) == "None 10"
    begin_attempt(tmp_path, 10)
    assert newest(tmp_path) == "None 10"
    begin_attempt(tmp_path, 5)
    assert newest(tmp_path) is None


@pytest.mark.fault("C4", "attempts.jsonl cut by a crash")
def test_line_that_crash_cut_is_dropped(tmp_path: Path, fault: Fault) -> None:
    first = begin_attempt(tmp_path, 0)
    save(tmp_path, 10, first)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"attempt": "ab", "from_s')
    fault.fired()
    assert newest(tmp_path) == f"{first} 10"
    begin_attempt(tmp_path, 5)
    assert newest(tmp_path) is None
    assert [line.row and line.row["from_step"] for line in read_lines(tmp_path / FILE)] == [0, 5]


def test_every_changed_bit_of_attempts_is_noticed(tmp_path: Path) -> None:
    begin_attempt(tmp_path, 0)
    begin_attempt(tmp_path, 5)
    path = tmp_path / FILE
    whole = path.read_bytes()
    first = whole.index(b"\n")
    for bit in range(8 * (first - 1)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        rewrite(path, damaged)
        with pytest.raises(CheckpointError, match=r"attempts.jsonl: line [12] is damaged"):
            Lineage(tmp_path)
        report = AuditReport(tmp_path)
        read_checkpoints(tmp_path, report)
        assert "files" in {problem.check for problem in report.problems}


def test_attempts_without_checksums_are_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"attempt": "a", "from_step": 0}\n')
    save(tmp_path, 10, "a")
    assert newest(tmp_path) == "a 10"
    begin_attempt(tmp_path, 10)
    assert newest(tmp_path) == "a 10"
