"""Ranks that alternate hold in each phase what `paceline plan` predicts."""

from pathlib import Path

import pytest

from tests.memory_phases import check_memory_of_two_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["train.offload=true"],
        [],
        ["train.tensor_parallel=2"],
    ],
    ids=["offload", "no offload", "tensor parallel"],
)
def test_fsdp_ranks_hold_planned_memory_in_each_phase(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_memory_of_two_ranks(["train.backend=fsdp", *settings], tmp_path, monkeypatch)
