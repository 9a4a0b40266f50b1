"""Weight transfer through shared memory: complete, verified, and nothing left behind."""

import errno
import os
from pathlib import Path

import pytest
import torch

from paceline.errors import SyncError
from paceline.rollout.service import RolloutService
from paceline.sync.block import WeightBlock, block_size, layout_of
from paceline.sync.shared_memory import BlockTarget, shared_file
from paceline.sync.weights import Weights
from tests.fault_report import Fault

TENSORS = [
    ("a", torch.arange(12.0).view(3, 4)),
    ("b", torch.ones(5, dtype=torch.bfloat16)),
    ("c", torch.tensor(7.0)),
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "block"
    file.write_bytes(bytes(block_size(layout_of(TENSORS))))
    return str(file)


def test_reader_gets_tensors_bit_for_bit(path: str) -> None:
    writer, reader = WeightBlock(path, layout_of(TENSORS)), WeightBlock(path, layout_of(TENSORS))
    weights = Weights(3, writer.write(TENSORS))
    reader.verify(weights)
    for name, tensor in TENSORS:
        assert torch.equal(reader.tensors[name], tensor)
        assert reader.tensors[name].dtype == tensor.dtype


@pytest.mark.parametrize("position", [0, 47, 64, 130])
@pytest.mark.fault("E2", "one bit of shared weights flipped")
def test_verify_fails_when_one_bit_is_flipped(path: str, position: int, fault: Fault) -> None:
    block = WeightBlock(path, layout_of(TENSORS))
    weights = Weights(3, block.write(TENSORS))
    content = bytearray(Path(path).read_bytes())
    content[position] ^= 1
    Path(path).write_bytes(content)
    fault.fired()
    with pytest.raises(SyncError, match="version 3 are corrupted"):
        WeightBlock(path, layout_of(TENSORS)).verify(weights)


@pytest.mark.fault("E2", "trainer exports too few tensors")
def test_write_fails_when_tensor_is_missing(path: str, fault: Fault) -> None:
    with pytest.raises(SyncError, match=r"did not export \['c'\]"):
        WeightBlock(path, layout_of(TENSORS)).write(TENSORS[:2])
    fault.fired()


@pytest.mark.fault("E2", "trainer overwrites weights while an engine loads them")
def test_engine_generates_nothing_after_torn_load_until_next_load(path: str, fault: Fault) -> None:
    block = WeightBlock(path, layout_of(TENSORS))

    class Engine:
        has_work, running, waiting, slots, tokens_sampled = True, 1, 0, 1, 0
        interfere = True

        def load(self, tensors: object, version: int) -> None:
            if self.interfere:
                block.tensors["a"].add_(1)  # the trainer starts on the next version

        def step(self) -> list[object]:
            return ["a token"]

    engine = Engine()
    service = RolloutService(engine)  # type: ignore[arg-type]
    service.weight_target.open(BlockTarget, path, layout_of(TENSORS))
    with pytest.raises(SyncError, match="version 1 are corrupted"):
        service.load_weights(Weights(1, block.write(TENSORS)))
    assert service.work() is None
    fault.fired()
    engine.interfere = False
    service.load_weights(Weights(2, block.write(TENSORS)))
    assert service.work() == ["a token"]


@pytest.mark.fault("C1", "no room for weights in memory or on disk")
def test_shared_file_fails_when_weights_fit_neither_memory_nor_disk(fault: Fault) -> None:
    with pytest.raises(
        SyncError, match=r"no room for 1125899.* GB of weights in .*/dev/shm or .*; free some"
    ):
        shared_file(1 << 50)
    fault.fired()


@pytest.mark.fault("C1", "shared memory full")
def test_shared_file_is_on_disk_when_memory_is_too_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    def small_memory(file: int, start: int, size: int) -> None:
        if os.path.realpath(f"/proc/self/fd/{file}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        os.truncate(file, size)

    monkeypatch.setattr(os, "posix_fallocate", small_memory)
    with shared_file(1000, memory=str(tmp_path)) as file:
        assert os.fstat(file.fileno()).st_size == 1000
    assert f"{tmp_path} has no room for" in caplog.text
    fault.fired()
    assert not list(tmp_path.iterdir())
