"""Real runs in which one prompt kills every engine that generates it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config
from paceline.errors import WorkerDied
from paceline.run import train
from paceline.workers.local import LocalCluster
from tests.fault_report import Fault
from tests.faults.poison import POISON_TOKENS, build_with_poison
from tests.processes import children
from tests.small_runs import SEPARATE

pytestmark = pytest.mark.slow  # every engine that dies is replaced by a new process
ROWS = 12
POISON = 5  # number of its row


@pytest.fixture
def settings(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("paceline.workers.local.build_parts", build_with_poison)
    rows = [{"prompt": "ab", "answer": "ab"} for _ in range(ROWS)]
    rows[POISON]["prompt"] = "ab" * POISON_TOKENS
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    return [
        f"model={model}",
        f"run_dir={tmp_path}/run",
        f"data.path={data}",
        f"reward.function={Path(__file__).parents[1]}/rewards.py:letters",
        *("groups_per_step=4", "group_size=2", "rollout.max_response_length=8", "save_every=1"),
        *("data.max_prompt_length=64", "data.shuffle=false", "placement.threads=1"),
    ]


def run(settings: list[str], *more: str) -> dict[str, Any]:
    try:
        return asyncio.run(train(load_config(None, [*settings, *more])))
    finally:
        assert not children()


@pytest.mark.fault("D7", "one prompt kills its rollout worker")
def test_only_poison_prompt_is_dropped_and_never_met_again(
    settings: list[str], fault: Fault
) -> None:
    more = [*SEPARATE, "schedule.max_staleness=1", "fleet.max_restarts=3"]
    first = run(settings, *more, "steps=4")
    assert first["ledger"]["dropped"] == {"quarantined": 2}, "once in each epoch"
    assert first["ledger"]["trained"] == 4 * 4
    assert first["fleet"]["replaced"] == 3
    fault.fired()
    resumed = run(settings, *more, "steps=7")
    assert resumed["ledger"]["dropped"]["quarantined"] >= 3
    assert resumed["fleet"]["replaced"] == 0


@pytest.mark.fault("D7", "one prompt kills the worker of the only pool")
def test_poison_prompt_is_found_when_each_death_ends_run(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    # With a GPU, the worker of a single pool is a process.
    monkeypatch.setattr(LocalCluster, "gpus", lambda *_: [0])
    for _ in range(3):
        with pytest.raises(WorkerDied):
            run(settings, "steps=3")
    found = run(settings, "steps=3")
    assert found["ledger"]["dropped"] == {"quarantined": 1}
    fault.fired()
    assert found["ledger"]["trained"] == 3 * 4
