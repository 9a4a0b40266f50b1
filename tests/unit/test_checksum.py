"""The checksum of a file changes with every kind of damage."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.checksum import PART_BYTES, PIECE_BYTES, checksums, join_sums, piece_sums

SIZE = PART_BYTES + PIECE_BYTES + 5


def content() -> bytearray:
    return bytearray(np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes())


def flip(data: bytearray) -> None:
    data[PART_BYTES + 3] ^= 1


def zero_page(data: bytearray) -> None:
    data[8192 : 8192 + 4096] = bytes(4096)


def swap_words(data: bytearray) -> None:
    data[16:24], data[800:808] = data[800:808], data[16:24]


def swap_rows(data: bytearray) -> None:
    data[:4096], data[8192:12288] = data[8192:12288], data[:4096]


def swap_pieces(data: bytearray) -> None:
    one, two = slice(0, PIECE_BYTES), slice(PIECE_BYTES, 2 * PIECE_BYTES)
    data[one], data[two] = data[two], data[one]


def append_zero(data: bytearray) -> None:
    data.append(0)


def truncate(data: bytearray) -> None:
    del data[-1:]


DAMAGE = [flip, zero_page, swap_words, swap_rows, swap_pieces, append_zero, truncate]


@pytest.mark.parametrize("damage", DAMAGE)
def test_checksum_changes_when_file_is_damaged(
    damage: Callable[[bytearray], None], tmp_path: Path
) -> None:
    whole, damaged, data = tmp_path / "whole", tmp_path / "damaged", content()
    whole.write_bytes(data)
    damage(data)
    damaged.write_bytes(data)
    first, second = checksums([whole, damaged])
    assert first != second


def test_checksum_of_parts_is_that_of_file(tmp_path: Path) -> None:
    data, path = np.frombuffer(content(), np.uint8), tmp_path / "file"
    path.write_bytes(data.tobytes())
    parts = [piece_sums(data[: 3 * PIECE_BYTES]), piece_sums(data[3 * PIECE_BYTES :])]
    assert checksums([path]) == [join_sums(parts, SIZE)]


def test_checksum_is_sha256_where_it_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    expected = hashlib.sha256(b"old").hexdigest()
    assert checksums([path], {path: expected}) == [expected]
