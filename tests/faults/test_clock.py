"""The clock of the machine is set while a run works: its deadlines use another clock."""

import asyncio
import time
from pathlib import Path

import pytest

from paceline.run import train
from tests.fault_report import Fault
from tests.small_runs import OnStep, config


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.fault("F8", "clock of the machine set by {hours} h during a run")
def test_run_ignores_jump_of_clock(
    hours: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    clock = time.time

    def jump(step: int) -> None:
        if step == 2:
            monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours)
            fault.fired()

    chosen = config(model, tmp_path, "steps=5", "stall_timeout_s=600", "save_every=1")
    summary = asyncio.run(train(chosen, lambda _: OnStep(jump)))
    assert abs(time.time() - clock()) > 3000, "the clock was not set"
    assert summary["steps"] == 5 and not summary["ledger"]["dropped"]
    fault.audited(tmp_path)
