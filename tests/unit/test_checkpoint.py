"""A checkpoint is whole or not there; a damaged one is named and passed over."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.train.checkpoint import (
    latest_checkpoint,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)


async def _write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "model.safetensors").write_bytes(b"weights" * 50)


def save(root: Path, step: int, keep: int = 2) -> Path:
    return asyncio.run(save_checkpoint(root, step, {"step": step}, _write, keep))


def test_the_newest_whole_checkpoint_is_found_and_older_ones_are_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000002", "step_00000003"]
    found = latest_checkpoint(tmp_path)
    assert found and read_state(found) == {"step": 3}


def test_a_checkpoint_cut_off_at_any_byte_of_any_file_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    for file in [path for path in newest.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        for length in range(0, len(content), 37):
            file.write_bytes(content[:length])
            found = latest_checkpoint(tmp_path)
            assert found and found.name == "step_00000001", (
                f"{file.name} cut at {length} was not noticed"
            )
        file.write_bytes(content)
    assert latest_checkpoint(tmp_path) == newest


@pytest.mark.parametrize("harm", ["flip", "remove", "add", "link", "schema"])
def test_any_other_harm_is_named(harm: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    file = folder / "actor" / "model.safetensors"
    if harm == "flip":
        file.write_bytes(b"W" + file.read_bytes()[1:])
    elif harm == "remove":
        file.unlink()
    elif harm == "add":
        (folder / "extra.bin").write_bytes(b"")
    elif harm == "link":
        os.symlink("/etc/hosts", folder / "link")
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"schema": 99}))
    words = {
        "flip": "is damaged",
        "remove": "is missing",
        "add": "is not part of the checkpoint",
        "link": "is a symbolic link",
        "schema": "schema 99",
    }
    with pytest.raises(CheckpointError, match=words[harm]):
        verify_checkpoint(folder)
    assert latest_checkpoint(tmp_path) is None


def test_a_save_that_fails_leaves_nothing_and_the_old_one_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)

    async def full_disk(folder: Path) -> None:
        await _write(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint of step 2 .*No space left"
    ):
        asyncio.run(save_checkpoint(tmp_path, 2, {}, full_disk, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def harm(folder: Path) -> None:
    (folder / "actor" / "model.safetensors").write_bytes(b"cut off")


def test_a_damaged_checkpoint_is_not_counted_as_one_that_is_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    harm(tmp_path / "step_00000002")
    save(tmp_path, 3)
    assert (tmp_path / "step_00000001").exists(), "it is the second whole one"
    save(tmp_path, 4)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000003", "step_00000004"]


def test_a_run_that_passed_over_a_damaged_checkpoint_keeps_what_it_saves_itself(
    tmp_path: Path,
) -> None:
    save(tmp_path, 20)
    harm(save(tmp_path, 30))
    save(tmp_path, 25, keep=1)
    found = latest_checkpoint(tmp_path)
    assert found and found.name == "step_00000025"
    save(tmp_path, 30, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000030"] and latest_checkpoint(
        tmp_path
    )


def test_what_a_killed_save_left_behind_goes_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".step_00000007.tmp" / "actor").mkdir(parents=True)
    save(tmp_path, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000008"]


def test_the_event_loop_goes_on_while_a_large_checkpoint_is_finished(tmp_path: Path) -> None:
    ticks = 0

    async def large(folder: Path) -> None:
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(256 << 20)

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def both() -> None:
        ticking = asyncio.create_task(tick())
        await save_checkpoint(tmp_path, 1, {}, large, 1)
        ticking.cancel()

    asyncio.run(both())
    assert ticks >= 5
