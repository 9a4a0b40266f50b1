"""Files of a checkpoint that all ranks write at the same time.

Every file holds whole tensors, and every rank writes about the same number of bytes. In each round
every rank receives the parts of one tensor from the other ranks and writes it, so that a rank holds
one full tensor at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.model.tensor_file import (
    Layout,
    Region,
    Shape,
    file_names,
    layout_bytes,
    split_layout,
    write_index,
    write_tensors,
)

Named = Iterable[tuple[str, Tensor]]


class Split(Protocol):
    """Tensors of one dtype that are gathered together; several ranks hold parts of them."""

    layout: Layout  # of the full tensors

    def holders(self, writer: int) -> list[int]:
        """Return the ranks whose parts `writer` needs: the same answer on every rank."""
        ...

    def part(self) -> Tensor:
        """Return the part of this rank. Only holders are asked."""
        ...

    def buffers(self, device: torch.device) -> list[Tensor]:
        """Return memory for the parts of all holders."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the full tensors, given the parts of all holders, in `buffers` if several."""
        ...


class Replicated:
    """A tensor that every rank has."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.layout: Layout = [(name, tuple(tensor.shape), tensor.dtype)]
        self._tensor = tensor

    def holders(self, writer: int) -> list[int]:
        return [writer]

    def part(self) -> Tensor:
        return self._tensor.detach()

    def buffers(self, device: torch.device) -> list[Tensor]:
        return [torch.empty_like(self._tensor, device=device)]

    def join(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return parts


class Sliced:
    """A tensor of which every rank has a slice. Ranks can have the same slice, or an empty one."""

    def __init__(self, name: str, shape: Shape, own: Tensor, regions: Sequence[Region]) -> None:
        """`regions`: the slice of each rank."""
        self.layout: Layout = [(name, shape, own.dtype)]
        self._own = own
        self._ranks: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank, region in enumerate(regions):
            bounds = tuple((part.start, part.stop) for part in region)
            if all(start < stop for start, stop in bounds):
                self._ranks.setdefault(bounds, []).append(rank)

    def holders(self, writer: int) -> list[int]:
        return [
            writer if writer in ranks else ranks[writer % len(ranks)]
            for ranks in self._ranks.values()
        ]

    def part(self) -> Tensor:
        return self._own.detach()

    def buffers(self, device: torch.device) -> list[Tensor]:
        """Return slices of one full tensor if they are contiguous: then they need no joining."""
        _, shape, dtype = self.layout[0]
        full = torch.empty(shape, dtype=dtype, device=device)
        slices = [full[tuple(slice(*bound) for bound in bounds)] for bounds in self._ranks]
        if all(part.is_contiguous() for part in slices):
            return slices
        return [torch.empty_like(part, memory_format=torch.contiguous_format) for part in slices]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if len(parts) == 1:
            return list(parts)
        full = parts[0]._base
        if full is None:
            _, shape, dtype = self.layout[0]
            full = torch.empty(shape, dtype=dtype, device=parts[0].device)
            for bounds, part in zip(self._ranks, parts, strict=True):
                full[tuple(slice(*bound) for bound in bounds)] = part
        return [full]


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that one rank writes together, because they are converted together."""

    splits: tuple[Split, ...]
    stored: Layout  # in the file


Round = list[tuple[int, Unit]]  # units with the ranks that write them


def write_files(
    folder: Path,
    stem: str,
    units: Sequence[Unit],
    convert: Callable[[Named], Named],
    device: torch.device,
    with_index: bool = False,
) -> None:
    """Write units to safetensors files. All ranks must call it with the same units.

    If one rank cannot write, all raise its OSError, which names the rank and the path.
    `convert` turns the full tensors of a unit into those of its layout in the file.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with _error_on_all_ranks(device):
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob(f"{stem}*.safetensors*"):
                old.unlink()
    rounds = assign_writers(units, ranks)
    shards = [split_layout(_written_by(writer, rounds)) for writer in range(ranks)]
    if not units:
        shards[0] = [[]]
    names = iter(file_names(sum(map(len, shards)), stem))
    files = [[(next(names), layout) for layout in own] for own in shards]
    with _error_on_all_ranks(device):
        _write_own(folder, files[rank], _arriving(rounds, convert, device))
    with _error_on_all_ranks(device):
        if rank == 0:
            _finish(folder, [file for own in files for file in own], with_index)


def _write_own(folder: Path, files: list[tuple[str, Layout]], arriving: Iterator[Tensor]) -> None:
    """Write the files of this rank."""
    for name, layout in files:
        try:
            write_tensors(folder / name, layout, islice(arriving, len(layout)))
        except OSError as error:
            for _ in arriving:  # the other ranks wait for the parts of this one
                pass
            error.filename = error.filename or str(folder / name)  # a full disk has none
            raise
    assert next(arriving, None) is None, "every tensor has a place"


def _finish(folder: Path, files: list[tuple[str, Layout]], with_index: bool) -> None:
    missing = [name for name, _ in files if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]} was written by another rank, but rank 0 does not see it; put "
            "run_dir on a file system that all machines share"
        )
    if with_index and len(files) > 1:
        write_index(folder, files)


def assign_writers(units: Sequence[Unit], ranks: int) -> list[Round]:
    """Assign units to ranks: in each round at most one to each rank, of similar sizes."""
    if ranks == 1:
        return [[(0, unit)] for unit in units]
    written = [0] * ranks
    ordered = sorted(units, key=lambda unit: -layout_bytes(unit.stored))
    rounds: list[Round] = []
    for start in range(0, len(ordered), ranks):
        # The largest unit goes to the rank with the fewest bytes.
        writers = sorted(range(ranks), key=written.__getitem__)
        rounds.append(list(zip(writers, ordered[start : start + ranks], strict=False)))
        for writer, unit in rounds[-1]:
            written[writer] += layout_bytes(unit.stored)
    return rounds


def _written_by(rank: int, rounds: list[Round]) -> Layout:
    return [
        entry
        for assigned in rounds
        for writer, unit in assigned
        if writer == rank
        for entry in unit.stored
    ]


def _arriving(
    rounds: list[Round], convert: Callable[[Named], Named], device: torch.device
) -> Iterator[Tensor]:
    """Take part in all rounds; yield the tensors that this rank writes."""
    for assigned in rounds:
        yield from (tensor for _, tensor in convert(_gather(assigned, device)))


@torch.no_grad()
def _gather(assigned: Round, device: torch.device) -> list[tuple[str, Tensor]]:
    """Send parts to the ranks that write them; return the full tensors that this rank writes."""
    rank = dist.get_rank()
    transfers: list[dist.P2POp] = []
    gathered: list[tuple[Split, list[Tensor]]] = []
    for writer, split in ((writer, split) for writer, unit in assigned for split in unit.splits):
        holders = split.holders(writer)
        if writer != rank:
            transfers += [
                dist.P2POp(dist.isend, split.part().contiguous(), writer)
                for holder in holders
                if holder == rank
            ]
        elif holders == [rank]:
            gathered.append((split, [split.part()]))
        else:
            parts = split.buffers(device)
            for holder, part in zip(holders, parts, strict=True):
                if holder == rank:
                    part.copy_(split.part())
                else:
                    transfers.append(dist.P2POp(dist.irecv, part, holder))
            gathered.append((split, parts))
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
    return [
        (name, tensor)
        for split, parts in gathered
        for (name, *_), tensor in zip(split.layout, split.join(parts), strict=True)
    ]


@contextmanager
def _error_on_all_ranks(device: torch.device) -> Iterator[None]:
    """Wait for all ranks at the end. If a rank cannot write, raise its error on every rank."""
    rank = dist.get_rank()
    found: Exception | None = None
    try:
        yield
    except OSError as error:
        found = OSError(error.errno, f"rank {rank}: {error.strerror or error}", error.filename)
    except CheckpointError as error:
        found = error
    failed = torch.tensor([found is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed)  # on GPUs this also connects them, which transfers between two cannot
    if failed.item():
        errors: list[Exception | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, found)
        raise next(error for error in errors if error is not None)
