"""Ranks that the modules of this directory share, because a rank takes seconds to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.training.fsdp import Fsdp
from tests.processes import SHARED, children
from tests.ranks import Ranks


class FsdpRanks:
    """Groups of FSDP ranks by their number, started on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[int, Ranks] = {}

    def __getitem__(self, count: int) -> Ranks:
        if count not in self._started:
            folder = self._folder / str(count)
            folder.mkdir()
            before = children()
            self._started[count] = Ranks(Fsdp, count, folder, backend="fsdp")
            SHARED.update(children() - before)
        return self._started[count]

    def close(self) -> None:
        for ranks in self._started.values():
            ranks.close()


@pytest.fixture(scope="package")
def fsdp_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpRanks]:
    made = FsdpRanks(tmp_path_factory.mktemp("fsdp"))
    yield made
    made.close()
