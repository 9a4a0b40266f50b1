"""A wrong tensor in the engine ends the run within one step, in every mode."""

import asyncio
from pathlib import Path

import pytest

from paceline.errors import MismatchError
from paceline.run import train
from tests.fault_report import Fault
from tests.small_runs import SEPARATE, config, steps_of
from tests.vllm import faults


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # On threads: processes are slow to start, and the fault is the same in them.
        (["placement.overlap=true"], "step 3: engine and trainer do not have the same weights"),
        pytest.param(
            [*SEPARATE, "schedule.max_staleness=1"],
            "step 4: .*over tokens of older versions",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sync", "one step off"],
)
@pytest.mark.fault("E5", "one tensor of an engine is wrong")
def test_run_fails_within_one_step_when_engine_has_wrong_tensor(
    settings: list[str],
    message: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    monkeypatch.setattr("paceline.workers.local.build_parts", faults.build_with_a_wrong_tensor)
    with pytest.raises(MismatchError, match=message):
        asyncio.run(train(config(model, tmp_path, "steps=6", *settings)))
    fault.fired()
    assert steps_of(tmp_path)[-1]["step"] <= 3
