"""Runs that are started and stopped in one program leave nothing behind."""

import gc
from pathlib import Path

import pytest

from benchmarks.cycles import IN_THREADS, cycle, run_cycles


@pytest.mark.slow
def test_runs_in_one_program_leave_nothing_behind(model: str, tmp_path: Path) -> None:
    cycle(tmp_path / "run", IN_THREADS[0], model)
    frozen = gc.get_freeze_count()
    growth, _, _ = run_cycles(8, 0, tmp_path, model)
    left = {kind: more for kind, more in growth.items() if more > 0}
    assert not left, "something was left behind"
    # Frozen objects are never freed: the models of every run would stay in memory.
    assert gc.get_freeze_count() <= frozen
