"""Checkpoints are complete or absent; damaged ones are logged and skipped."""

import asyncio
import errno
import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.checksum import checksums
from paceline.errors import CheckpointError
from paceline.training import checkpoint
from paceline.training.checkpoint import (
    latest_checkpoint,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)
from tests.fault_report import Fault
from tests.files import rewrite


async def _write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "model.safetensors").write_bytes(b"weights" * 50)


def save(root: Path, step: int, keep: int = 2) -> Path:
    return asyncio.run(save_checkpoint(root, step, {"step": step}, _write, keep))


def test_save_deletes_checkpoints_beyond_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000002", "step_00000003"]


def test_copy_of_checkpoint_is_neither_resumed_nor_deleted(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 1), tmp_path / "step_00000001.backup")
    shutil.copytree(save(tmp_path, 2), tmp_path / "step_00000009.backup")
    found = latest_checkpoint(tmp_path)
    assert found and read_state(found) == {"step": 2}
    for step in (3, 4):
        save(tmp_path, step)
    names = ["step_00000001.backup", "step_00000003", "step_00000004", "step_00000009.backup"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == names


@pytest.mark.fault("C5", "run directory deleted before a save")
def test_save_does_not_create_run_directory_that_is_gone(tmp_path: Path, fault: Fault) -> None:
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        save(tmp_path / "run" / "checkpoints", 1)
    fault.fired()
    assert not (tmp_path / "run").exists()


@pytest.mark.fault("C2", "each file of a checkpoint truncated at many bytes")
def test_latest_skips_checkpoint_when_any_file_is_truncated(tmp_path: Path, fault: Fault) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    for file in [path for path in newest.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        for length in range(0, len(content), 37):
            rewrite(file, content[:length])
            found = latest_checkpoint(tmp_path)
            fault.fired()
            assert found and found.name == "step_00000001", (
                f"{file.name} truncated at {length} was not detected"
            )
        rewrite(file, content)
    assert latest_checkpoint(tmp_path) == newest


@pytest.mark.parametrize("damage", ["flip", "remove", "add", "link", "schema"])
@pytest.mark.fault("C3", "damaged checkpoint: {damage}")
def test_verify_names_damage(damage: str, tmp_path: Path, fault: Fault) -> None:
    folder = save(tmp_path, 1)
    file = folder / "actor" / "model.safetensors"
    if damage == "flip":
        file.write_bytes(b"W" + file.read_bytes()[1:])
    elif damage == "remove":
        file.unlink()
    elif damage == "add":
        (folder / "extra.bin").write_bytes(b"")
    elif damage == "link":
        os.symlink("/etc/hosts", folder / "link")
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"schema": 99}))
    messages = {
        "flip": "is damaged",
        "remove": "is missing",
        "add": "is not part of the checkpoint",
        "link": "is a symbolic link",
        "schema": "schema 99",
    }
    fault.fired()
    with pytest.raises(CheckpointError, match=messages[damage]):
        verify_checkpoint(folder)
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.fault("C1", "disk full while a checkpoint is written")
def test_failed_save_leaves_previous_checkpoint_only(tmp_path: Path, fault: Fault) -> None:
    save(tmp_path, 1)

    async def full_disk(folder: Path) -> None:
        await _write(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot write .* step 2 .*No space left"):
        asyncio.run(save_checkpoint(tmp_path, 2, {}, full_disk, 2))
    fault.fired()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.fault("C2", "disk cannot read a file of the last checkpoint")
def test_latest_skips_checkpoint_when_disk_cannot_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    save(tmp_path, 2)
    broken = save(tmp_path, 4)

    def read(files: Sequence[Path], like: Mapping[Path, str] | None = None) -> list[str]:
        if broken in files[0].parents:
            fault.fired()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return checksums(files, like)

    monkeypatch.setattr(checkpoint, "checksums", read)
    with pytest.raises(CheckpointError, match=r"step_00000004 cannot be read: .*output error"):
        verify_checkpoint(broken)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "step_00000002"


def damage(folder: Path) -> None:
    (folder / "actor" / "model.safetensors").write_bytes(b"truncated")


@pytest.mark.fault("C9", "newest checkpoint damaged before old ones are deleted")
def test_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path, fault: Fault) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    damage(tmp_path / "step_00000002")
    fault.fired()
    save(tmp_path, 3)
    assert (tmp_path / "step_00000001").exists(), "only it and step 3 are complete"
    save(tmp_path, 4)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000003", "step_00000004"]


@pytest.mark.fault("C9", "later checkpoint damaged, one is kept")
def test_resumed_run_keeps_its_checkpoint_when_later_one_is_damaged(
    tmp_path: Path, fault: Fault
) -> None:
    save(tmp_path, 20)
    damage(save(tmp_path, 30))
    fault.fired()
    save(tmp_path, 25, keep=1)
    found = latest_checkpoint(tmp_path)
    assert found and found.name == "step_00000025"
    save(tmp_path, 30, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000030"]
    assert latest_checkpoint(tmp_path)


def test_save_removes_leftovers_of_killed_save(tmp_path: Path) -> None:
    (tmp_path / ".step_00000007.tmp" / "actor").mkdir(parents=True)
    save(tmp_path, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000008"]


def test_event_loop_runs_while_checkpoint_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, ran = os.fsync, threading.Event()

    async def saved() -> None:
        loop = asyncio.get_running_loop()

        def slow_disk(descriptor: int) -> None:
            loop.call_soon_threadsafe(ran.set)
            assert ran.wait(60), "the event loop waits for the disk"
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", slow_disk)
        await save_checkpoint(tmp_path, 1, {}, _write, 1)

    asyncio.run(saved())
    assert ran.is_set()


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.timeout(60)
@pytest.mark.fault("C3", "{name} of a checkpoint is a pipe")
def test_pipe_in_checkpoint_is_damage_and_not_waited_for(
    name: str, tmp_path: Path, fault: Fault
) -> None:
    folder = save(tmp_path, 1)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    fault.fired()
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(folder)
    (folder / name).rename(folder / "state.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_state(folder)


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "over an earlier one"])
@pytest.mark.fault("A13", "save cancelled at a random moment, 50 times")
def test_cancelled_save_leaves_whole_checkpoint_or_none(
    earlier: bool, tmp_path: Path, fault: Fault
) -> None:
    """The clean-up of a cancelled save must not run into the thread that finishes it."""

    async def many(folder: Path) -> None:
        for number in range(5):
            (folder / f"{number}.bin").write_bytes(bytes(2000))

    async def cancelled(root: Path, delay_s: float) -> None:
        saving = asyncio.create_task(save_checkpoint(root, 5, {"step": 5}, many, 2))
        await asyncio.sleep(delay_s)
        saving.cancel()
        await asyncio.wait({saving})

    begun = time.monotonic()
    asyncio.run(save_checkpoint(tmp_path / "whole", 5, {"step": 5}, many, 2))
    longest_s = 2 * (time.monotonic() - begun)  # half of the saves end before they are cancelled
    rng, whole = random.Random(0), 0
    for number in range(50):
        root = tmp_path / str(number)
        if earlier:
            save(root, 5)
        asyncio.run(cancelled(root, rng.random() * longest_s))
        for folder in root.glob("step_*"):
            verify_checkpoint(folder)
            whole += 1
        assert not list(root.glob(".*"))
    assert whole == 50 if earlier else 0 < whole <= 50
    fault.fired()


def test_old_checkpoint_disappears_before_its_files_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while it deletes a checkpoint leaves no damaged one."""
    for step in (1, 2):
        save(tmp_path, step)
    deleted = []

    def killed(path: Path, *_: Any, **__: Any) -> None:
        deleted.append(path.name)

    monkeypatch.setattr(shutil, "rmtree", killed)
    save(tmp_path, 3)
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == [
        "step_00000002",
        "step_00000003",
    ]
    assert all(name.startswith(".step_") for name in deleted)


def test_unchanged_checkpoint_is_not_read_again_by_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    read: list[str] = []
    checksums = checkpoint.checksums

    def counted(files: Sequence[Path], like: Mapping[Path, str] | None = None) -> list[str]:
        read.extend(map(str, files))
        return checksums(files, like)

    monkeypatch.setattr(checkpoint, "checksums", counted)
    save(tmp_path, 2)
    assert read and not [path for path in read if "step_00000001" in path]


def test_checkpoint_with_sha256_of_whole_files_is_still_verified(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in manifest["files"]
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema": 2, "files": files}))
    verify_checkpoint(folder)
    (folder / "actor" / "model.safetensors").write_bytes(b"Weights" * 50)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        verify_checkpoint(folder)
