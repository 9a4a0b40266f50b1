"""Complete runs with real models, processes and shared memory, in every mode."""

import asyncio
import errno
import hashlib
import json
import logging
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from paceline.config import RunConfig, load_config
from paceline.errors import CheckpointError, PacelineError, WorkerDied
from paceline.line_file import intact_rows
from paceline.observe.trace import convert
from paceline.rollout.in_flight_files import read_in_flight
from paceline.run import train
from paceline.run_dir import lock_run_dir
from paceline.training import checkpoint
from paceline.training.checkpoint import verify_checkpoint
from paceline.types import Group
from paceline.workers.local import LocalCluster
from tests.audits import assert_consistent
from tests.device_times import assert_device_time_adds_up, assert_valid_trace
from tests.fault_report import Fault
from tests.models import random_model
from tests.processes import children

SEPARATE = ["placement.actor=train", "placement.rollout=rollout"]
SMALL = [
    "steps=4",
    "groups_per_step=4",
    "group_size=4",
    "data.task=copy:3",
    "rollout.max_response_length=8",
    "placement.threads=1",
    "train.learning_rate=1e-3",
    "data.max_prompt_length=32",
    f"reward.function={Path(__file__).parents[1]}/rewards.py:letters",
]


def config(model: str, folder: Path, *settings: str) -> RunConfig:
    return load_config(None, [f"model={model}", f"run_dir={folder}", *SMALL, *settings])


def run(model: str, folder: Path, *settings: str) -> dict[str, Any]:
    return asyncio.run(train(config(model, folder, *settings)))


def weights(folder: Path, step: int, role: str = "actor") -> str:
    """Return a digest of all files the role saved: weights and optimizer state."""
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    folders = (checkpoint / role, checkpoint / "training" / role)
    files = [file for where in folders for file in sorted(where.rglob("*.safetensors"))]
    assert len(files) >= 2
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_staleness_0_equals_hybrid_sync_bit_for_bit_in_every_placement(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path / "hybrid", "steps=10")
    run(model, tmp_path / "separate", "steps=10", *SEPARATE)
    run(model, tmp_path / "overlap", "steps=10", "placement.overlap=true")
    run(model, tmp_path / "other_seed", "steps=10", "seed=1")
    # with a GPU, the worker of a single pool is a process
    monkeypatch.setattr(LocalCluster, "gpus", lambda *_: [0])
    run(model, tmp_path / "process", "steps=10")
    run(model, tmp_path / "overlap_process", "steps=10", "placement.overlap=true")
    assert (tmp_path / "process" / "logs" / "main.log").exists()
    placements = ("hybrid", "separate", "overlap", "process", "overlap_process")
    assert len({weights(tmp_path / placement, 10) for placement in placements}) == 1
    assert weights(tmp_path / "hybrid", 10) != weights(tmp_path / "other_seed", 10)


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
SLOW = {"with a reference", "two engines", "two steps per sync"}


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
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["train/logprob_diff_max"] for row in rows if row["staleness/max"] == 0) < 1e-4
    assert children() == before, "a child process is still running"
    assert_consistent(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="hybrid"),
        pytest.param(
            ["algorithm.name=ppo", "placement.critic=critic_pool"], id="ppo", marks=pytest.mark.slow
        ),
    ],
)
def test_resumed_sync_run_equals_uninterrupted_run(
    model: str, tmp_path: Path, settings: list[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(model, whole, "steps=6", "train.lr_schedule=constant", *settings)
    run(model, parts, "steps=3", "train.lr_schedule=constant", *settings)
    run(model, parts, "steps=6", "train.lr_schedule=constant", *settings)
    assert weights(whole, 6) == weights(parts, 6)
    assert _rewards(whole) == _rewards(parts)
    assert (whole / "ledger.jsonl").read_text() == (parts / "ledger.jsonl").read_text()
    assert_consistent(parts)


def test_resumed_async_run_trains_every_prompt_once(model: str, tmp_path: Path) -> None:
    """On threads: tests/faults/test_whole_run.py resumes a run with processes."""
    settings = MODES["one device, overlapping"]
    run(model, tmp_path, "steps=3", *settings)
    summary = run(model, tmp_path, "steps=6", *settings)
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [event["seq"] for event in events if event["event"] == "trained"] == list(range(24))
    assert any(event["event"] == "reissued" for event in events)
    assert summary["steps"] == 6 and summary["ledger"]["trained"] == 24
    assert_consistent(tmp_path)


@pytest.mark.fault("A9", "run dies after step 5, weights compared with an undisturbed run")
def test_run_resumes_from_last_checkpoint_when_killed(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(model, whole, "steps=6")

    class Stop(Exception):
        pass

    class Killer:
        def step_done(self, step: int, *_: object) -> None:
            if step == 5:
                raise Stop

        def engines_polled(self, *_: object) -> None:
            return

    with pytest.raises(Stop):
        asyncio.run(train(config(model, killed, "steps=6", "save_every=2"), lambda _: Killer()))
    fault.fired()
    assert len((killed / "metrics.jsonl").read_text().splitlines()) == 5
    assert_consistent(killed)
    run(model, killed, "steps=6", "save_every=2")
    fault.recovered()
    assert weights(whole, 6) == weights(killed, 6)
    assert _rewards(whole) == _rewards(killed)
    assert (whole / "ledger.jsonl").read_text() == (killed / "ledger.jsonl").read_text()
    fault.audited(killed)


class Recording:
    """Observer that keeps the trained groups and ends the run at a step, like a crash."""

    class Crash(Exception):
        pass

    def __init__(self, last: int) -> None:
        self.groups: dict[int, Group] = {}
        self._last = last

    def step_done(self, step: int, metrics: object, groups: Sequence[Group]) -> None:
        self.groups |= {group.seq: group for group in groups}
        if step == self._last:
            raise self.Crash

    def engines_polled(self, *_: object) -> None:
        return


@pytest.mark.parametrize(
    "mode", [pytest.param("fully async, swap", marks=pytest.mark.slow), "one device, async"]
)
def test_resumed_run_continues_completions_of_killed_one(
    mode: str, model: str, tmp_path: Path
) -> None:
    settings = ["steps=6", "save_every=2", "rollout.max_response_length=64", *MODES[mode]]
    chosen = config(model, tmp_path, *settings)
    with pytest.raises(Recording.Crash):
        asyncio.run(train(chosen, lambda _: Recording(5)))
    saved = read_in_flight(tmp_path / "checkpoints" / "step_00000004")
    observer = Recording(0)
    asyncio.run(train(chosen, lambda _: observer))
    assert sorted(observer.groups) == list(range(16, 24))
    assert "groups in flight, with" in (tmp_path / "logs" / "main.log").read_text()
    compared = 0
    for seq in saved.keys() & observer.groups.keys():
        trained = observer.groups[seq].trajectories
        parts = {i: t.turns[0].completion for i, t in saved[seq].finished.items()}
        parts |= {i: c[0].completion for i, c in saved[seq].calls.items() if c and c[0].completion}
        scored = saved[seq].scored
        for index, trajectory in enumerate(scored.trajectories if scored else ()):
            parts[index] = trajectory.turns[0].completion
        for index, part in parts.items():
            whole = trained[index].turns[0].completion
            for array in ("tokens", "logprobs", "versions"):
                begun = getattr(whole, array)[: len(part)]
                assert begun.tolist() == getattr(part, array).tolist()
            compared += len(part)
    assert compared
    assert_consistent(tmp_path)


def test_run_starts_groups_over_without_save_in_flight(model: str, tmp_path: Path) -> None:
    settings = MODES["one device, async"]
    run(model, tmp_path, "steps=2", "save_in_flight=false", *settings)
    assert not list(tmp_path.rglob("in_flight"))
    run(model, tmp_path, "steps=3", *settings)  # the setting may change
    assert_consistent(tmp_path)


def test_checkpoint_written_beside_training_is_that_of_its_step(model: str, tmp_path: Path) -> None:
    beside, alone = tmp_path / "beside", tmp_path / "alone"
    constant = ["algorithm.name=ppo", "train.lr_schedule=constant"]
    run(model, beside, "steps=3", "save_every=1", "keep_checkpoints=9", *constant)
    run(model, alone, "steps=1", *constant)  # written after training
    for role in ("actor", "critic"):
        assert weights(beside, 1, role) == weights(alone, 1, role)
    folders = [folder / "checkpoints" / "step_00000001" for folder in (beside, alone)]
    files = [{str(f.relative_to(folder)) for f in folder.rglob("*")} for folder in folders]
    assert files[0] == files[1]
    for step in (2, 3):
        shutil.rmtree(beside / "checkpoints" / f"step_{step:08d}")
    run(model, beside, "steps=2", *constant)
    run(model, alone, "steps=2", *constant)
    assert weights(beside, 2) == weights(alone, 2) and _rewards(beside) == _rewards(alone)
    assert (beside / "ledger.jsonl").read_text() == (alone / "ledger.jsonl").read_text()


def test_worker_process_writes_checkpoint_beside_training(model: str, tmp_path: Path) -> None:
    run(model, tmp_path / "alone", "steps=1", "train.lr_schedule=constant")
    settings = ["steps=2", "save_every=1", "train.lr_schedule=constant", *SEPARATE]
    run(model, tmp_path / "process", *settings)
    assert weights(tmp_path / "process", 1) == weights(tmp_path / "alone", 1)


@pytest.mark.fault("C1", "file size limit while a checkpoint is written")
def test_run_fails_with_cause_when_checkpoint_beside_training_cannot_be_written(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    """The limit on file sizes stands for a full disk; it is smaller than the model's file."""
    chosen = config(model, tmp_path, "steps=100000", "save_every=1", "save_samples=0")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 1 .*large"):
            asyncio.run(train(chosen))
        fault.fired()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_checkpoint_is_loadable_by_transformers_and_new_run(model: str, tmp_path: Path) -> None:
    # a common combination that `save_pretrained` of transformers rejects
    ends = GenerationConfig(eos_token_id=[2, 9], temperature=0.6)
    copy = shutil.copytree(model, tmp_path / "model")
    ends.to_json_file(copy / "generation_config.json")
    run(str(copy), tmp_path / "first", "steps=2")
    trained = tmp_path / "first" / "checkpoints" / "step_00000002" / "actor"
    loaded = AutoModelForCausalLM.from_pretrained(trained)
    assert loaded.generation_config.eos_token_id == [2, 9]
    assert AutoTokenizer.from_pretrained(trained).decode([5, 6])
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any(
        not torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items()
    )
    assert run(str(trained), tmp_path / "second", "steps=1")["steps"] == 1


@pytest.mark.fault("C8", "run resumed with other settings or another model")
def test_resume_fails_and_names_difference_when_settings_or_model_change(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    folder = tmp_path / "run"
    run(model, folder, "steps=1")
    with pytest.raises(CheckpointError, match=r"train\.learning_rate: was 0\.001, is now 0\.5"):
        run(model, folder, "steps=2", "train.learning_rate=0.5")
    with pytest.raises(CheckpointError, match=r"data\.task: was 'copy:3', is now 'reverse:3'"):
        run(model, folder, "steps=2", "data.task=reverse:3")
    other = random_model(tmp_path / "other", seed=5)
    with pytest.raises(CheckpointError, match="model: was"):
        run(other, folder, "steps=2")
    random_model(tmp_path / "again", seed=1)
    run(str(tmp_path / "again"), tmp_path / "run2", "steps=1")
    random_model(tmp_path / "again", seed=2)
    with pytest.raises(CheckpointError, match="model: its content changed"):
        run(str(tmp_path / "again"), tmp_path / "run2", "steps=2")
    fault.fired()


CONSTANT = ["train.lr_schedule=constant", "save_every=1", "keep_checkpoints=9"]


@pytest.fixture(scope="module")
def four_steps(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four") / "run"
    run(model, folder, "steps=4", *CONSTANT)
    return folder


def test_run_starts_again_from_earlier_step(model: str, four_steps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(four_steps, tmp_path / "run")
    chosen = config(model, folder, "steps=4", *CONSTANT)
    with pytest.raises(CheckpointError, match=r"--from 9: there is no checkpoint .*step_00000004"):
        asyncio.run(train(chosen, start_from="9"))
    assert asyncio.run(train(chosen, start_from="2"))["steps_this_run"] == 2
    assert weights(folder, 4) == weights(four_steps, 4)
    assert (folder / "ledger.jsonl").read_text() == (four_steps / "ledger.jsonl").read_text()
    (aside,) = (folder / "checkpoints").glob("abandoned.*")
    assert sorted(path.name for path in aside.iterdir()) == ["step_00000003", "step_00000004"]


def test_run_branches_from_checkpoint_of_other_run(
    model: str, four_steps: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    middle = str(four_steps / "checkpoints" / "step_00000002")
    same = config(model, tmp_path / "same", "steps=4", *CONSTANT)
    assert asyncio.run(train(same, start_from=middle))["steps_this_run"] == 2
    assert weights(tmp_path / "same", 4) == weights(four_steps, 4), "with the optimizer's state"
    assert _rewards(tmp_path / "same") == _rewards(four_steps)
    assert "had other settings" not in caplog.text
    with pytest.raises(CheckpointError, match="has a run already"):
        asyncio.run(train(same, start_from=middle))
    with pytest.raises(CheckpointError, match="is a checkpoint of this run; give its step"):
        asyncio.run(train(config(model, four_steps, *CONSTANT), start_from=middle))
    faster = config(model, tmp_path / "faster", "steps=3", "train.learning_rate=0.01", *CONSTANT)
    asyncio.run(train(faster, start_from=middle))
    assert "train.learning_rate: was 0.001, is now 0.01" in caplog.text
    assert weights(tmp_path / "faster", 3) != weights(four_steps, 3)
    assert run(model, tmp_path / "faster", "steps=4", "train.learning_rate=0.01", *CONSTANT)
    assert weights(four_steps, 4) == weights(tmp_path / "same", 4), "the old run is unchanged"


def test_new_run_directory_is_readable_only_by_owner(four_steps: Path) -> None:
    assert four_steps.stat().st_mode & 0o777 == 0o700


@pytest.mark.fault("A8", "unfinished checkpoint of a killed run")
def test_start_removes_leftovers_of_killed_run(
    model: str, four_steps: Path, tmp_path: Path, fault: Fault
) -> None:
    folder = shutil.copytree(four_steps, tmp_path / "run")
    (folder / "checkpoints" / ".step_00000005.tmp" / "actor").mkdir(parents=True)
    fault.fired()
    run(model, folder, "steps=4", *CONSTANT)  # complete, so nothing is saved
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.fault("C7", "second run in the same directory")
def test_run_fails_when_run_directory_is_in_use(model: str, tmp_path: Path, fault: Fault) -> None:
    chosen = config(model, tmp_path / "run")
    with (
        lock_run_dir(Path(chosen.run_dir)),
        pytest.raises(CheckpointError, match="in use by another run"),
    ):
        asyncio.run(train(chosen))
    fault.fired()


@pytest.mark.fault("C5", "run directory is a file")
def test_run_fails_when_run_directory_is_a_file(model: str, tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used"):
        run(model, tmp_path / "file")
    fault.fired()


@pytest.mark.fault("C1", "disk full while metrics are written")
def test_run_fails_with_cause_when_disk_is_full(model: str, tmp_path: Path, fault: Fault) -> None:
    class Full:
        def step_done(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def engines_polled(self, *_: object) -> None:
            return

    with pytest.raises(
        CheckpointError, match=r"run cannot be written: No space left on device; fix the cause"
    ):
        asyncio.run(train(config(model, tmp_path / "run"), lambda _: Full()))
    fault.fired()


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
@pytest.mark.fault("C4", "part of {name} missing, then a cut last line")
def test_resume_fails_when_part_of_metrics_or_ledger_is_missing(
    name: str, model: str, tmp_path: Path, fault: Fault
) -> None:
    run(model, tmp_path, "steps=1")
    content = (tmp_path / name).read_bytes()
    for damaged in (b"", content[:-9]):
        (tmp_path / name).write_bytes(damaged)
        message = f"{name} does not match the checkpoint of step 1: a part is missing"
        with pytest.raises(CheckpointError, match=message):
            run(model, tmp_path, "steps=2")
    (tmp_path / name).write_bytes(content + b'{"half a li')
    assert run(model, tmp_path, "steps=2")["steps"] == 2
    fault.fired()
    fault.audited(tmp_path)


@pytest.mark.fault("C3", "line of ledger.jsonl, metrics.jsonl or samples.jsonl damaged")
def test_resume_names_damaged_line_of_ledger_and_skips_one_of_other_files(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    """A ledger line decides which prompts are trained; other lines are only read by people."""
    run(model, tmp_path, "steps=3")
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    for damaged in (ledger.replace(b'"seq": 1', b'"seq": 2', 1), ledger[:-1] + b"x"):
        (tmp_path / "ledger.jsonl").write_bytes(damaged)
        message = r"ledger.jsonl does not match .* line (2|24) is damaged. Restore the file"
        with pytest.raises(CheckpointError, match=message):
            run(model, tmp_path, "steps=4")
    (tmp_path / "ledger.jsonl").write_bytes(ledger)
    for name in ("metrics.jsonl", "samples.jsonl"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(b'"step": 2', b'"step": 6', 1))
    with caplog.at_level(logging.WARNING, "paceline"):
        assert run(model, tmp_path, "steps=4")["steps"] == 4
    assert "metrics.jsonl: line 2 is damaged and is skipped" in caplog.text
    fault.fired()
    assert [row["step"] for row in intact_rows(tmp_path / "metrics.jsonl")] == [1, 3, 4]


@pytest.mark.parametrize("act", ["rename", "delete", "replace"])
@pytest.mark.fault("C5", "run directory during a run: {act}")
def test_run_fails_when_run_directory_is_moved_or_deleted(
    act: str, model: str, tmp_path: Path, fault: Fault
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"

    class Mover:
        acted = 0

        def step_done(self, step: int, *_: object) -> None:
            done = [path.name for path in (folder / "checkpoints").glob("*step*")]
            # Not while a checkpoint is being written: `rm` itself would fail.
            if not self.acted and done and not any(name.endswith(".tmp") for name in done):
                self.acted = step
                folder.rename(other)
                if act == "delete":
                    shutil.rmtree(other)
                elif act == "replace":
                    shutil.copytree(other, folder, ignore=shutil.ignore_patterns("*.sock"))

        def engines_polled(self, *_: object) -> None:
            return

    mover = Mover()
    what = "deleted" if act == "delete" else f"moved to {other}/ledger.jsonl"
    chosen = config(model, folder, "steps=99", "save_every=2")
    with pytest.raises(CheckpointError, match=f"run_dir = {folder}: ledger.jsonl was {what} while"):
        asyncio.run(train(chosen, lambda _: mover))
    fault.fired()
    if act == "replace":
        assert not (folder / "summary.json").exists()
    else:
        assert not folder.exists(), "the run created its directory again"
    if act == "rename":
        steps = mover.acted + 1
        assert run(model, other, f"steps={steps}", "save_every=2")["steps"] == steps
        fault.audited(other)


@pytest.mark.parametrize("damage", ["missing", "invalid", "outdated"])
@pytest.mark.fault("C3", "summary.json {damage}")
def test_finished_run_rewrites_summary_when_missing_or_damaged(
    damage: str, model: str, tmp_path: Path, fault: Fault
) -> None:
    run(model, tmp_path, "steps=1")
    earlier = (tmp_path / "summary.json").read_text()
    run(model, tmp_path, "steps=2")
    if damage == "missing":
        (tmp_path / "summary.json").unlink()
    else:
        (tmp_path / "summary.json").write_text(earlier if damage == "outdated" else "{")
    fault.fired()
    assert run(model, tmp_path, "steps=2")["steps"] == 2
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


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


@pytest.mark.parametrize("victim", ["train", "rollout"])
@pytest.mark.fault("A7", "worker {victim} killed, no restarts allowed")
def test_run_fails_and_names_worker_when_worker_is_killed(
    victim: str, model: str, tmp_path: Path, fault: Fault
) -> None:
    class Killer:
        def step_done(self, step: int, *_: object) -> None:
            if step == 2:
                os.kill(_worker_pids(tmp_path)[victim], signal.SIGKILL)
                fault.fired()

        def engines_polled(self, *_: object) -> None:
            return

    settings = [
        *SEPARATE,
        "schedule.max_staleness=2",
        "schedule.on_sync=swap",
        "fleet.max_restarts=0",
    ]
    chosen = config(model, tmp_path, "steps=1000", "save_every=1", *settings)
    with pytest.raises(WorkerDied, match=f"worker '{victim}' died .killed by signal 9"):
        asyncio.run(asyncio.wait_for(train(chosen, lambda _: Killer()), 60))
    fault.detected()
    assert not children()
    fault.audited(tmp_path)


def _worker_pids(folder: Path) -> dict[str, int]:
    """Return the process ID of each worker, identified by the log file that it has open."""
    found = {}
    for process in psutil.Process().children():
        for file in (folder / "logs").glob("*.log"):
            if os.path.realpath(f"/proc/{process.pid}/fd/1") == str(file.resolve()):
                found[file.stem] = process.pid
    return found


def _rewards(folder: Path) -> list[float]:
    return [
        json.loads(line)["reward/mean"]
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.fault("E4", "newest checkpoint missing for one start, then back")
def test_run_does_not_resume_from_abandoned_future(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    """The newest checkpoint is out of reach for one start, and there again for the next one."""
    folder, hidden = tmp_path / "run", tmp_path / "hidden"
    settings = ["save_every=1", "keep_checkpoints=9"]
    run(model, folder, *settings, "steps=4")
    (folder / "checkpoints/step_00000004").rename(hidden)
    (folder / "checkpoints/step_00000003").rename(tmp_path / "other")
    run(model, folder, *settings, "steps=3")
    hidden.rename(folder / "checkpoints/step_00000004")
    fault.fired()
    run(model, folder, *settings, "steps=5")
    attempts = (folder / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["from_step"] for line in attempts] == [0, 2, 3]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    fault.audited(folder)


@pytest.mark.fault("D4", "data file changes between two starts")
def test_resume_fails_when_data_changes(model: str, tmp_path: Path, fault: Fault) -> None:
    data, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(4)))
    settings = [setting for setting in SMALL if not setting.startswith("data.task")]
    settings += [f"model={model}", f"run_dir={folder}", f"data.path={data}"]
    asyncio.run(train(load_config(None, [*settings, "steps=1"])))
    data.write_text(data.read_text().replace("3", "4"))
    fault.fired()
    with pytest.raises(CheckpointError, match="data: its content changed"):
        asyncio.run(train(load_config(None, [*settings, "steps=2"])))


class Payload:
    """What a pickle could do when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("where", ["checkpoint", "model"])
@pytest.mark.fault("G3", "weights of a {where} replaced by a pickle with code")
def test_pickle_with_code_is_not_run(where: str, model: str, tmp_path: Path, fault: Fault) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "run"
    content = pickle.dumps(Payload(marker))
    other = shutil.copytree(model, tmp_path / "model")
    if where == "checkpoint":
        run(str(other), folder, "steps=1")
        saved = folder / "checkpoints" / "step_00000001"
        for file in saved.rglob("*.safetensors"):
            file.write_bytes(content)
        manifest = json.loads((saved / "manifest.json").read_text())
        manifest["files"] = checkpoint._digests(saved)  # as somebody who wants it to be read does
        (saved / "manifest.json").write_text(json.dumps(manifest))
        verify_checkpoint(saved)
    else:
        (other / "model.safetensors").unlink()
        (other / "pytorch_model.bin").write_bytes(content)
    fault.fired()
    with pytest.raises(PacelineError):
        run(str(other), folder, "steps=2")
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the payload does nothing"
