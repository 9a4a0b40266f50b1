"""Every rank writes about as much as the others, and each tensor is written once."""

import pytest
import torch

from paceline.training.rank_files import Replicated, Sliced, Unit, assign_writers

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
def test_slices_join_to_the_full_tensor(columns: bool) -> None:
    full = torch.arange(12.0).view(3, 4)
    rows = [(slice(0, 2), slice(0, 4)), (slice(2, 3), slice(0, 4))]
    regions = [(slice(0, 3), slice(0, 3)), (slice(0, 3), slice(3, 4))] if columns else rows
    split = Sliced("x", (3, 4), full[regions[0]], regions)
    parts = split.buffers(torch.device("cpu"))
    for part, region in zip(parts, regions, strict=True):
        assert part.is_contiguous(), "it is received from another rank"
        part.copy_(full[region])
    assert torch.equal(split.join(parts)[0], full)
