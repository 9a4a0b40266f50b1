"""A checkpoint is whole or not there; a damaged one is named and passed over."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.train.checkpoint import latest_checkpoint, read_state, save_checkpoint, verify_checkpoint


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
            assert found and found.name == "step_00000001", f"{file.name} cut at {length} was not noticed"
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
    words = {"flip": "is damaged", "remove": "is missing", "add": "does not belong", "link": "is a link", "schema": "schema 99"}
    with pytest.raises(CheckpointError, match=words[harm]):
        verify_checkpoint(folder)
    assert latest_checkpoint(tmp_path) is None


def test_a_save_that_fails_leaves_nothing_and_the_old_one_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)

    async def full_disk(folder: Path) -> None:
        await _write(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left"):
        asyncio.run(save_checkpoint(tmp_path, 2, {}, full_disk, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
