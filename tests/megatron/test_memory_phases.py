"""Megatron ranks that alternate hold in each phase what `paceline plan` predicts."""

from pathlib import Path

import pytest

from tests.megatron.cpu_workers import cpu_workers
from tests.megatron.test_hybrid_ranks import MEGATRON
from tests.memory_phases import MODEL, check_memory_of_two_ranks

MODULES = 60 << 20  # of Megatron, in host memory


@pytest.mark.parametrize("settings", MEGATRON.values(), ids=MEGATRON)
def test_megatron_ranks_hold_planned_memory_in_each_phase(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Gloo copies the gradients that it reduces and the parameters that it gathers; NCCL does not.
    copied = MODEL if settings == MEGATRON["data parallel"] else MODEL // 2
    with cpu_workers():
        check_memory_of_two_ranks(settings, tmp_path, monkeypatch, MODULES, copied)
