"""Lines with a checksum: every flipped bit is noticed or changes nothing."""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError
from paceline.line_file import LineFile, encode_line, intact_rows, read_lines
from paceline.queue.ledger import Ledger
from tests.fault_report import Fault
from tests.files import rewrite

Row = dict[str, Any]


def ledger_rows(path: Path) -> list[Row]:
    ledger = Ledger(path)
    for step in range(2):
        for _ in range(3):
            seq = ledger.issue()
            if seq == 4:
                ledger.drop(seq, "rollout_failed", 'took "too" long')
            else:
                ledger.trained(seq, uid=f"row:{seq}", step=step, staleness=0)
    ledger.close()
    return list(intact_rows(path))


def flips(content: bytes, count: int = 1, tries: int = 0) -> Iterator[bytes]:
    """Yield the content with each bit flipped, or `tries` times with `count` random bits."""
    numbers = random.Random(0)
    bits = range(8 * len(content))
    for chosen in [numbers.sample(bits, count) for _ in range(tries)] or [[bit] for bit in bits]:
        damaged = bytearray(content)
        for bit in chosen:
            damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


@pytest.mark.parametrize(("bits", "tries"), [(1, 0), (2, 2000), (20, 1000)])
@pytest.mark.fault("C3", "{bits} bits of ledger.jsonl flipped")
def test_every_flipped_bit_is_noticed(bits: int, tries: int, tmp_path: Path, fault: Fault) -> None:
    path = tmp_path / "ledger.jsonl"
    rows = ledger_rows(path)
    assert [row["event"] for row in rows].count("trained") == 5
    content = path.read_bytes()
    for damaged in flips(content, bits, tries):
        rewrite(path, damaged)
        lines = list(read_lines(path))
        intact = [line.row for line in lines if line.row is not None and line.whole]
        assert any(line.row is None or not line.whole for line in lines), damaged
        fault.fired()
        assert all(row in rows for row in intact), damaged


def test_lines_are_ordinary_json(tmp_path: Path) -> None:
    row = {"text": "日本 \ud800 \u2028\r\n", "number": 1.5, "nested": [{"a": None}]}
    for ascii_only in (True, False):
        line = encode_line(row, ascii_only=ascii_only)
        assert line.count(b"\n") == 1 and line.endswith(b"\n")
        parsed = json.loads(line)
        assert list(parsed) == [*row, "crc"]
        (tmp_path / "file").write_bytes(line)
        assert list(intact_rows(tmp_path / "file")) == [row]


def test_lines_of_earlier_versions_are_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2, "by": "somebody"}\n')
    file = LineFile(path, path.stat().st_size)
    file.write({"step": 3})
    file.close()
    assert [row["step"] for row in intact_rows(path)] == [1, 2, 3]


def test_line_without_checksum_is_damaged_after_lines_with_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_line({"step": 1}) + b'{"step": 2}\n')
    assert [line.row for line in read_lines(path)] == [{"step": 1}, None]


@pytest.mark.parametrize("text", [b"[1]", b"", b"\xff\xfe", b"[" * 9999, b"9" * 5000, b"{}x"])
def test_reader_warns_and_names_line_when_line_is_damaged(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_line({"step": 1}) + text + b"\n" + encode_line({"step": 3}))
    with caplog.at_level(logging.WARNING):
        assert [row["step"] for row in intact_rows(path)] == [1, 3]
    assert f"{path}: line 2 is damaged and is skipped" in caplog.text


@pytest.mark.fault("C4", "last line cut at every byte")
def test_reader_skips_incomplete_last_line_without_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    path = tmp_path / "metrics.jsonl"
    for length in range(1, len(encode_line({"step": 2}))):
        rewrite(path, encode_line({"step": 1}) + encode_line({"step": 2})[:length])
        rows = list(intact_rows(path))
        assert rows[0] == {"step": 1} and rows[1:] in ([], [{"step": 2}])
        fault.fired()
    assert not caplog.text


@pytest.mark.fault("C4", "last line damaged, then a run continues the file")
def test_next_line_is_intact_when_last_line_is_damaged(tmp_path: Path, fault: Fault) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 30)
    file = LineFile(path, 20)
    file.write({"step": 2})
    file.close()
    assert [line.row for line in read_lines(path)] == [None, {"step": 2}]
    fault.fired()


@pytest.mark.parametrize("act", ["rename", "delete", "recreate", "file"])
@pytest.mark.fault("C5", "file of a run: {act}")
def test_writer_fails_when_its_directory_is_moved_or_deleted(
    act: str, tmp_path: Path, fault: Fault
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = LineFile(folder / "ledger.jsonl")
    file.write({"step": 1})
    file.flush()
    if act in ("rename", "recreate"):
        folder.rename(tmp_path / "other")
        expected = rf"moved to {tmp_path}/other/ledger.jsonl .* set run_dir={tmp_path}/other, and"
    else:
        file.path.unlink()
        expected = "run_dir = .*/run: ledger.jsonl was deleted while the run was using it"
    if act == "recreate":
        folder.mkdir()
        (folder / "ledger.jsonl").write_text("")
    if act == "delete":
        folder.rmdir()
    fault.fired()
    with pytest.raises(CheckpointError, match=expected):
        file.flush()
    file.close()
