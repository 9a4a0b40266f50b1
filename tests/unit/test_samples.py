"""samples.jsonl: each step is saved once, also after a crash, and is shown readably."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from paceline.errors import CheckpointError
from paceline.observe.samples import NAME, Samples, read_samples, samples_panel
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn


def group(
    seq: int,
    version: int = 0,
    texts: tuple[str, ...] = ("good", "bad"),
    finish: Finish = Finish.STOP,
) -> Group:
    completion = Completion(
        np.zeros(3, np.int32), np.zeros(3, np.float32), np.full(3, version, np.int32), finish
    )
    trajectories = tuple(
        Trajectory(
            (Turn((1,), completion),),
            text,
            reward=float(len(texts) - index),
            details={"format": 0.5},
        )
        for index, text in enumerate(texts)
    )
    return Group(seq, Prompt(f"row:{seq}", (1,), f"question {seq}", {}), trajectories, 0.0, 0.0)


def write(folder: Path, first_step: int, steps: range, groups: int = 1) -> None:
    samples = Samples(folder, groups, first_step)
    for step in steps:
        samples.step_done(
            step, [group(2 * step, version=step - 1), group(2 * step + 1, version=step - 3)]
        )
    samples.close()


def test_samples_saves_requested_number_of_prompts_per_step(tmp_path: Path) -> None:
    for kept in (0, 1, 2, 5):
        write(tmp_path, 0, range(1, 4), kept)
        assert len((tmp_path / NAME).read_text().splitlines()) == 3 * min(kept, 2)


def test_saved_completion_has_reward_details_and_staleness(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4), groups=2)
    first, second = read_samples(tmp_path)
    assert (first["step"], first["uid"]) == (3, "row:6")
    assert (first["staleness"], second["staleness"]) == (0, 2)
    assert first["completions"][1] == {
        "reward": 1.0,
        "details": {"format": 0.5},
        "tokens": 3,
        "finish": "stop",
        "text": "bad",
    }


def test_resumed_run_saves_each_step_once_when_last_line_is_incomplete(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 6))
    with (tmp_path / NAME).open("a") as file:
        file.write('{"step": 6, "se')
    write(tmp_path, 3, range(4, 8))
    lines = (tmp_path / NAME).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 8))


def test_samples_preserve_any_text(tmp_path: Path) -> None:
    text = "two\nlines\r\n\u2028 and \u0085 \x1b[31m [bold]marks[/] 日本語 🙂 \ud800"
    samples = Samples(tmp_path, 1, 0)
    samples.step_done(1, [group(0, texts=(text,))])
    samples.close()
    (row,) = read_samples(tmp_path)
    assert row["completions"][0]["text"] == text


def test_panel_shows_best_completion_first_and_marks_truncated(tmp_path: Path) -> None:
    samples = Samples(tmp_path, 1, 0)
    samples.step_done(1, [group(0, texts=("fine [b]\x1b[2J", "poor"), finish=Finish.LENGTH)])
    samples.close()
    console = Console(width=60, record=True, file=(tmp_path / "screen").open("w"))
    console.print(samples_panel(read_samples(tmp_path)[0]))
    shown = console.export_text()
    assert (
        shown.index("reward 2, format 0.5, 3 tokens, truncated")
        < shown.index("fine [b]·[2J")
        < shown.index("reward 1")
        < shown.index("poor")
    )


def test_read_samples_fails_when_file_or_step_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; expected a run directory"):
        read_samples(tmp_path)
    write(tmp_path, 0, range(1, 4), groups=0)
    with pytest.raises(CheckpointError, match="save_samples = 0"):
        read_samples(tmp_path)
    write(tmp_path, 0, range(1, 4))
    with pytest.raises(CheckpointError, match="no step 9; it has 1 to 3"):
        read_samples(tmp_path, 9)
