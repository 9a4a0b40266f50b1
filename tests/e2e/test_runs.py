"""Complete runs with real models, processes and shared memory, in every mode."""

import asyncio
import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

from paceline.errors import WorkerDied
from paceline.line_file import intact_rows
from paceline.observe.trace import convert
from paceline.run import train
from paceline.workers.local import LocalCluster
from tests.audits import assert_consistent
from tests.device_times import assert_device_time_adds_up, assert_valid_trace
from tests.fault_report import Fault
from tests.processes import children, worker_pids
from tests.small_runs import SEPARATE, OnStep, config, run, steps_of, weights

MODES = {
    "hybrid": [],
    "split": ["algorithm.name=ppo", "placement.critic=critic_pool"],
    "with a reference": ["algorithm.kl_coef=0.1", "placement.ref=ref_pool"],
    "one step off": [*SEPARATE, "schedule.max_staleness=1"],
    "fully async, swap": [*SEPARATE, "schedule.max_staleness=2", "schedule.on_sync=swap"],
    "fully async, interrupt": [
        *SEPARATE,
        "schedule.max_staleness=2",
        "schedule.on_sync=interrupt",
    ],
    "two engines": [
        *SEPARATE,
        "schedule.max_staleness=3",
        "schedule.on_sync=swap",
        "placement.rollout_workers=2",
    ],
    "one device, async": ["schedule.max_staleness=2", "schedule.on_sync=swap"],
    "one device, overlapping": [
        "placement.overlap=true",
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
    ],
    "two steps per sync": [
        *SEPARATE,
        "schedule.max_staleness=1",
        "schedule.sync_every=2",
        "schedule.on_sync=swap",
    ],
}


@pytest.mark.fault("E8", "asynchronous run with max_staleness = 0 beside a synchronous one")
def test_staleness_0_equals_hybrid_sync_bit_for_bit_in_every_placement(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    run(model, tmp_path / "hybrid", "steps=10")
    run(model, tmp_path / "separate", "steps=10", *SEPARATE)
    run(model, tmp_path / "overlap", "steps=10", "placement.overlap=true")
    run(model, tmp_path / "other_seed", "steps=10", "seed=1")
    placements = ("hybrid", "separate", "overlap")
    assert len({weights(tmp_path / placement, 10) for placement in placements}) == 1
    assert weights(tmp_path / "hybrid", 10) != weights(tmp_path / "other_seed", 10)
    fault.fired()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["placement.overlap=true"]], ids=["turns", "overlap"])
def test_process_of_single_pool_gives_weights_of_thread(
    settings: list[str], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU, the worker of a single pool is a process."""
    workers: set[str] = set()
    watch = OnStep(lambda _: workers.update(worker_pids(tmp_path / "process")))
    run(model, tmp_path / "thread", *settings)
    monkeypatch.setattr(LocalCluster, "gpus", lambda *_: [0])
    asyncio.run(train(config(model, tmp_path / "process", *settings), lambda _: watch))
    assert workers == {"main"}
    assert weights(tmp_path / "process", 4) == weights(tmp_path / "thread", 4)


@pytest.mark.fault("E7", "50 steps with a learning rate of 0")
def test_weights_stay_the_same_when_learning_rate_is_0(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    settings = ["steps=50", "save_every=5", "train.learning_rate=0", "keep_checkpoints=20"]
    run(model, tmp_path, *settings, *MODES["one device, overlapping"])
    digests = {
        hashlib.sha256(file.read_bytes()).hexdigest()
        for file in tmp_path.glob("checkpoints/step_*/actor/model.safetensors")
    }
    assert len(list(tmp_path.glob("checkpoints/step_*"))) == 10 and len(digests) == 1
    rows = list(intact_rows(tmp_path / "metrics.jsonl"))
    assert len(rows) == 50 and max(row["staleness/max"] for row in rows) > 0
    fault.fired()
    # It is measured where tokens have the version of the trainer.
    name = "train/logprob_diff_max"
    assert 0 <= max(row[name] for row in rows if name in row) < 1e-5


# The torture tests run every schedule; here, real processes run one of each kind.
SLOW = {"with a reference", "one step off", "two engines", "two steps per sync"}
SLOW |= {"fully async, interrupt"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(*mode, marks=pytest.mark.slow if mode[0] in SLOW else ())
        for mode in MODES.items()
    ],
)
def test_mode_trains_every_prompt_once_within_staleness_bound(
    name: str, settings: list[str], model: str, tmp_path: Path
) -> None:
    before = children()
    summary = run(model, tmp_path, *settings, "trace=true")
    chosen = config(model, tmp_path, *settings)
    assert summary["steps"] == 4
    assert_device_time_adds_up(summary["device_time"])
    assert_valid_trace(convert(tmp_path))
    assert 0 <= summary["staleness_max"] <= chosen.schedule.max_staleness
    ledger = summary["ledger"]
    assert ledger["trained"] == 16 and not ledger["dropped"]
    assert ledger["issued"] == ledger["trained"] + ledger["outstanding"]
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    trained = [event["seq"] for event in events if event["event"] == "trained"]
    assert trained == list(range(16)), "prompts were lost, repeated or reordered"
    rows = steps_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["train/logprob_diff_max"] for row in rows if row["staleness/max"] == 0) < 1e-4
    assert children() == before, "a child process is still running"
    assert_consistent(tmp_path)


def test_run_leaves_report_and_distributions_of_all_completions(model: str, tmp_path: Path) -> None:
    run(model, tmp_path, "steps=2")
    first, second = intact_rows(tmp_path / "distributions.jsonl")
    for row in (first, second):
        for measure in ("staleness", "length", "reward"):
            assert sum(row["trained"][measure].values()) == 16
            assert row["generated"][measure] == row["trained"][measure]
    (row, *_) = intact_rows(tmp_path / "samples.jsonl")
    sample = row["completions"][0]
    assert len(sample["logprobs"]) == len(sample["token_characters"]) == sample["tokens"]
    assert sample["versions"] == [[0, sample["tokens"]]]
    assert "Content-Security-Policy" in (tmp_path / "report.html").read_text()


# tests/faults/test_workers.py also kills rollout workers until the run fails.
@pytest.mark.parametrize("victim", ["train", pytest.param("rollout", marks=pytest.mark.slow)])
@pytest.mark.fault("A7", "worker {victim} killed, no restarts allowed")
def test_run_fails_and_names_worker_when_worker_is_killed(
    victim: str, model: str, tmp_path: Path, fault: Fault
) -> None:
    def kill(step: int) -> None:
        if step == 2:
            os.kill(worker_pids(tmp_path)[victim], signal.SIGKILL)
            fault.fired()

    settings = [
        *SEPARATE,
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
        "fleet.max_restarts=0",
    ]
    chosen = config(model, tmp_path, "steps=1000", "save_every=1", *settings)
    with pytest.raises(WorkerDied, match=f"worker '{victim}' died .killed by signal 9"):
        asyncio.run(asyncio.wait_for(train(chosen, lambda _: OnStep(kill)), 240))
    fault.detected()
    assert not children()
    fault.audited(tmp_path)
