"""Runs that are started and stopped in one program leave nothing behind."""

import gc
from pathlib import Path

import pytest

from benchmarks.cycles import IN_THREADS, cycle, run_cycles
from tests.fault_report import Fault


@pytest.mark.slow
@pytest.mark.fault("F7", "8 runs started and stopped in one program")
def test_runs_in_one_program_leave_nothing_behind(model: str, tmp_path: Path, fault: Fault) -> None:
    cycle(tmp_path / "run", IN_THREADS[0], model)
    frozen = gc.get_freeze_count()
    growth, _, (_, used_mb) = run_cycles(8, 0, tmp_path, model)
    left = {kind: more for kind, more in growth.items() if more > 0}
    assert not left, "something was left behind"
    assert used_mb < 1, "memory that is in use grows with every run"
    # Frozen objects are never freed: the models of every run would stay in memory.
    assert gc.get_freeze_count() <= frozen
    fault.fired()
