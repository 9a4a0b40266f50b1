"""The directory of a run: permissions, locks, damage, and what happens if it is moved or full."""

import asyncio
import errno
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import CheckpointError, PacelineError
from paceline.line_file import intact_rows
from paceline.run import train
from paceline.run_dir import lock_run_dir, move_aside
from paceline.training import checkpoint
from paceline.training.checkpoint import verify_checkpoint
from tests.fault_report import Fault
from tests.small_runs import OnStep, config, run


@pytest.mark.fault("C7", "second run in the same directory")
def test_run_fails_when_run_directory_is_in_use(model: str, tmp_path: Path, fault: Fault) -> None:
    chosen = config(model, tmp_path / "run")
    with (
        lock_run_dir(Path(chosen.run_dir)),
        pytest.raises(CheckpointError, match="in use by another run"),
    ):
        asyncio.run(train(chosen))
    fault.fired()


@pytest.mark.fault("C7", "second run in the same directory after its lock was deleted")
def test_second_run_fails_when_lock_of_running_one_is_deleted(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    chosen, found = config(model, tmp_path / "run"), list[str]()

    def start_second(step: int) -> None:
        if step == 2:
            (tmp_path / "run" / "lock").unlink()
            with pytest.raises(CheckpointError) as refused, lock_run_dir(Path(chosen.run_dir)):
                pass
            found.append(str(refused.value))

    asyncio.run(train(chosen, lambda _: OnStep(start_second)))
    assert len(found) == 1 and "in use by another run" in found[0]
    fault.fired()
    fault.audited(tmp_path / "run")


def test_forked_process_does_not_keep_run_directory_locked(tmp_path: Path) -> None:
    """The parent is killed, so only the child could hold the lock."""
    program = (
        "import os, time; from pathlib import Path; from paceline.run_dir import lock_run_dir\n"
        f"with lock_run_dir(Path({str(tmp_path)!r})):\n"
        "    child = os.fork()\n"
        "    if child == 0: time.sleep(600)\n"
        "    print(child, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            with lock_run_dir(tmp_path):
                assert psutil.pid_exists(child)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.fault("C5", "run directory is a file")
def test_run_fails_when_run_directory_is_a_file(model: str, tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used"):
        run(model, tmp_path / "file")
    fault.fired()


@pytest.mark.fault("C1", "disk full while metrics are written")
def test_run_fails_with_cause_when_disk_is_full(model: str, tmp_path: Path, fault: Fault) -> None:
    def fail(step: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        CheckpointError, match=r"run cannot be written: No space left on device; fix the cause"
    ):
        asyncio.run(train(config(model, tmp_path / "run"), lambda _: OnStep(fail)))
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

    acted = 0

    def move(step: int) -> None:
        nonlocal acted
        done = [path.name for path in (folder / "checkpoints").glob("*step*")]
        # Not while a checkpoint is being written: `rm` itself would fail.
        if not acted and done and not any(name.endswith(".tmp") for name in done):
            acted = step
            folder.rename(other)
            if act == "delete":
                shutil.rmtree(other)
            elif act == "replace":
                shutil.copytree(other, folder, ignore=shutil.ignore_patterns("*.sock"))

    what = "deleted" if act == "delete" else f"moved to {other}/ledger.jsonl"
    chosen = config(model, folder, "steps=99", "save_every=2")
    with pytest.raises(CheckpointError, match=f"run_dir = {folder}: ledger.jsonl was {what} while"):
        asyncio.run(train(chosen, lambda _: OnStep(move)))
    fault.fired()
    if act == "replace":
        assert not (folder / "summary.json").exists()
    else:
        assert not folder.exists(), "the run created its directory again"
    if act == "rename":
        steps = acted + 1
        assert run(model, other, f"steps={steps}", "save_every=2")["steps"] == steps
        fault.audited(other)


@pytest.mark.parametrize("damage", ["missing", "invalid", "outdated", "incomplete"])
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
        texts = {"outdated": earlier, "invalid": "{", "incomplete": '{"steps": 2}'}
        (tmp_path / "summary.json").write_text(texts[damage])
    fault.fired()
    assert run(model, tmp_path, "steps=2")["steps"] == 2
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["steps"] == 2 and written["ledger"]["trained"] == 8


def test_directory_is_not_moved_aside_when_it_contains_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for name in (".", "..", str(tmp_path)):
        with pytest.raises(CheckpointError, match="contains the current directory"):
            move_aside(Path(name))
    assert move_aside(tmp_path / "inner" / "no such directory") is None


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
        manifest["files"] = checkpoint._digests(saved)  # so that the checksums hold
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
