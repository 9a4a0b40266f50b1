"""A stopped or killed run continues where it was; checkpoints of a run and their use."""

import asyncio
import json
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from paceline.config import load_config
from paceline.errors import CheckpointError
from paceline.rollout.in_flight_files import read_in_flight
from paceline.run import train
from paceline.types import Group
from tests.audits import assert_consistent
from tests.e2e.test_runs import MODES
from tests.fault_report import Fault
from tests.models import random_model
from tests.small_runs import SEPARATE, SMALL, OnStep, config, run, steps_of, weights


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

    def kill(step: int) -> None:
        if step == 5:
            raise Stop

    with pytest.raises(Stop):
        asyncio.run(train(config(model, killed, "steps=6", "save_every=2"), lambda _: OnStep(kill)))
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
        parts = {i: t.turns[0].completion for i, (t,) in saved[seq].finished.items()}
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
    with pytest.raises(
        CheckpointError, match=r"--from 9 .*: there is no checkpoint .*step_00000004"
    ):
        asyncio.run(train(chosen, start_from="9"))
    assert asyncio.run(train(chosen, start_from="2"))["steps_this_run"] == 2
    assert weights(folder, 4) == weights(four_steps, 4)
    assert (folder / "ledger.jsonl").read_text() == (four_steps / "ledger.jsonl").read_text()
    (aside,) = (folder / "checkpoints").glob("abandoned.*")
    assert sorted(path.name for path in aside.iterdir()) == ["step_00000003", "step_00000004"]


@pytest.mark.parametrize("part", ["", "checkpoints/step_00000004/actor"])
def test_start_names_checkpoint_when_another_directory_is_given(
    part: str, model: str, four_steps: Path, tmp_path: Path
) -> None:
    chosen = config(model, tmp_path / "new", "steps=5", *CONSTANT)
    with pytest.raises(CheckpointError, match=r"did you mean .*/checkpoints/step_00000004\?"):
        asyncio.run(train(chosen, start_from=str(four_steps / part)))


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


def _rewards(folder: Path) -> list[float]:
    return [row["reward/mean"] for row in steps_of(folder)]


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
