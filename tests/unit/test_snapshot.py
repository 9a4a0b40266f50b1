"""A snapshot holds what tensors were when it was taken, and a thread writes it to files."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checksum import checksums
from paceline.model import file_writer, snapshot
from paceline.model.snapshot import Snapshot
from paceline.model.tensor_file import write_tensors
from tests.fault_report import Fault


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    return {
        "matrix": torch.arange(600_000.0).view(2000, 300).t() * scale,  # not contiguous
        "half": torch.full((7,), 0.5, dtype=torch.bfloat16) * scale,
        "step": torch.tensor(3.0) * scale,
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


def write(path: Path, named: dict[str, Tensor]) -> None:
    layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()]
    write_tensors(path, layout, named.values())


@pytest.mark.parametrize("chunk", [2**20, 2**21, 2**25])
def test_snapshot_writes_values_of_its_moment(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "CHUNK_BYTES", chunk)
    taken = Snapshot()
    for scale in (1.0, 2.0):  # the second one uses the memory of the first
        named = tensors(scale)
        with taken.taking():
            write(tmp_path / "a.safetensors", named)
            write(tmp_path / "b.safetensors", {"x": named["matrix"] + 1})
        for tensor in named.values():
            tensor.zero_()
        taken.written.result()
        write(tmp_path / "expected.safetensors", tensors(scale))
        expected = (tmp_path / "expected.safetensors").read_bytes()
        assert (tmp_path / "a.safetensors").read_bytes() == expected
        left = (tmp_path / "a.safetensors.checksum").read_text()
        assert [left] == checksums([tmp_path / "a.safetensors"])
        found = load_file(tmp_path / "b.safetensors")["x"]
        assert torch.equal(found, tensors(scale)["matrix"] + 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.fault("C1", "disk full while weights are written in the background")
def test_full_disk_is_error_of_snapshot(tmp_path: Path, fault: Fault) -> None:
    os.symlink("/dev/full", tmp_path / "a.safetensors")
    taken = Snapshot()
    with taken.taking():
        write(tmp_path / "a.safetensors", tensors())
    with pytest.raises(OSError, match="No space left"):
        taken.written.result()
    fault.fired()


def test_file_is_written_at_once_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "available_memory", lambda: 1000)
    taken = Snapshot()
    with taken.taking():
        write(tmp_path / "a.safetensors", tensors())
        assert torch.equal(load_file(tmp_path / "a.safetensors")["matrix"], tensors()["matrix"])


def test_failed_save_ends_snapshot(tmp_path: Path) -> None:
    taken = Snapshot()
    with pytest.raises(ValueError, match="planted"), taken.taking():
        write(tmp_path / "a.safetensors", tensors())
        raise ValueError("planted")
    with taken.taking():
        write(tmp_path / "a.safetensors", tensors(2.0))
    taken.written.result()
    assert torch.equal(load_file(tmp_path / "a.safetensors")["step"], torch.tensor(6.0))


def test_available_memory_respects_limit_of_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 3000\n")
    assert snapshot.available_memory() == 4000
