"""Every rank writes about as much as the others, each tensor once, and all learn of an error."""

import asyncio
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.remote.process import process_group
from paceline.training.rank_files import Replicated, Sliced, Unit, assign_writers, write_files
from tests.fault_report import Fault

SIZES = [700, 1, 40, 40, 300, 5, 5, 5, 120, 64]


def unit(size: int) -> Unit:
    split = Replicated(f"tensor of {size}", torch.empty(size))
    return Unit((split,), split.layout)


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_every_unit_has_one_writer_and_writers_share_bytes(ranks: int) -> None:
    units = [unit(size) for size in SIZES]
    rounds = assign_writers(units, ranks)
    assert all(len({writer for writer, _ in found}) == len(found) for found in rounds)
    written = [one for found in rounds for _, one in found]
    assert sorted(map(id, written)) == sorted(map(id, units))
    sizes = [0] * ranks
    for writer, one in (pair for found in rounds for pair in found):
        sizes[writer] += one.stored[0][1][0]
    assert max(sizes) - min(sizes) <= max(SIZES)


def test_one_rank_keeps_order_of_units() -> None:
    units = [unit(size) for size in SIZES]
    assert [one for found in assign_writers(units, 1) for _, one in found] == units


def test_writer_uses_its_own_slice_and_skips_empty_ones() -> None:
    """Five ranks: two slices, each held by two ranks, and one rank without any."""
    slices = [(slice(0, 2),), (slice(2, 3),)]
    split = Sliced("x", (3,), torch.ones(2), [*slices, *slices, (slice(3, 3),)])
    assert split.holders(writer=2) == [2, 1]
    assert split.holders(writer=4) == [0, 1]


@pytest.mark.parametrize("columns", [False, True])
def test_slices_join_to_full_tensor(columns: bool) -> None:
    full = torch.arange(12.0).view(3, 4)
    rows = [(slice(0, 2), slice(0, 4)), (slice(2, 3), slice(0, 4))]
    regions = [(slice(0, 3), slice(0, 3)), (slice(0, 3), slice(3, 4))] if columns else rows
    split = Sliced("x", (3, 4), full[regions[0]], regions)
    parts = split.buffers(torch.device("cpu"))
    for part, region in zip(parts, regions, strict=True):
        assert part.is_contiguous(), "it is received from another rank"
        part.copy_(full[region])
    assert torch.equal(split.join(parts)[0], full)


class RankWriter:
    """Runs in each of two ranks."""

    def write(self, folder: Path, failing_rank: int) -> None:
        """Write six tensors, of which each rank has a half. The files of one rank are limited."""
        rank, size = dist.get_rank(), 100_000
        regions = [(slice(0, size),), (slice(size, 2 * size),)]
        splits = [
            Sliced(f"tensor {number}", (2 * size,), torch.full((size,), float(rank)), regions)
            for number in range(6)
        ]
        units = [Unit((split,), split.layout) for split in splits]
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == failing_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        try:
            write_files(folder, "model", units, lambda named: named, torch.device("cpu"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def build_writer() -> Mapping[str, Any]:
    return {"writer": RankWriter()}


@pytest.mark.fault("C1", "file size limit of one rank while all ranks write a checkpoint")
def test_all_ranks_name_rank_and_path_when_one_cannot_write(tmp_path: Path, fault: Fault) -> None:
    async def main() -> list[Any]:
        group = process_group("test", build_writer, (), ranks=2, threads=1, log_folder=tmp_path)
        try:
            await group.ready()
            calls = [rank.call("writer", "write", tmp_path / "model", 1) for rank in group.ranks]
            async with asyncio.timeout(60):
                return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await group.close()

    for error in asyncio.run(main()):
        assert isinstance(error, OSError)
        assert "rank 1: File too large" in str(error)
        assert str(tmp_path / "model" / "model-00002-of-00002.safetensors") in str(error)
    fault.fired()
