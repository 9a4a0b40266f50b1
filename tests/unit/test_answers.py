"""What the model said is there to be read, once a step, also after a crash."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from paceline.errors import CheckpointError
from paceline.observe.samples import NAME, Samples, answers_panel, read_answers
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
    attempts = tuple(
        Trajectory(
            (Turn((1,), completion),),
            text,
            reward=float(len(texts) - index),
            details={"format": 0.5},
        )
        for index, text in enumerate(texts)
    )
    return Group(seq, Prompt(f"row:{seq}", (1,), f"question {seq}", {}), attempts, 0.0, 0.0)


def write(folder: Path, first_step: int, steps: range, groups: int = 1) -> None:
    answers = Samples(folder, groups, first_step)
    for step in steps:
        answers.step_done(
            step, [group(2 * step, version=step - 1), group(2 * step + 1, version=step - 3)]
        )
    answers.close()


def test_of_each_step_as_many_prompts_are_kept_as_asked_for(tmp_path: Path) -> None:
    for kept in (0, 1, 2, 5):
        write(tmp_path, 0, range(1, 4), kept)
        assert len((tmp_path / NAME).read_text().splitlines()) == 3 * min(kept, 2)


def test_an_answer_is_written_with_all_that_explains_its_reward(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4), groups=2)
    first, second = read_answers(tmp_path)
    assert (first["step"], first["uid"], first["staleness"], second["staleness"]) == (
        3,
        "row:6",
        0,
        2,
    )
    assert first["answers"][1] == {
        "reward": 1.0,
        "details": {"format": 0.5},
        "tokens": 3,
        "finish": "stop",
        "text": "bad",
    }


def test_a_continued_run_writes_each_step_once_also_when_a_line_was_cut_off(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 6))
    with (tmp_path / NAME).open("a") as file:
        file.write('{"step": 6, "se')
    write(tmp_path, 3, range(4, 8))
    assert [json.loads(line)["step"] for line in (tmp_path / NAME).read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
    ]


def test_any_text_survives(tmp_path: Path) -> None:
    text = "two\nlines\r\n\u2028 and \u0085 \x1b[31m [bold]marks[/] 日本語 🙂 \ud800"
    answers = Samples(tmp_path, 1, 0)
    answers.step_done(1, [group(0, texts=(text,))])
    answers.close()
    (row,) = read_answers(tmp_path)
    assert row["answers"][0]["text"] == text


def test_the_best_answer_is_shown_first_and_a_cut_off_one_says_so(tmp_path: Path) -> None:
    answers = Samples(tmp_path, 1, 0)
    answers.step_done(1, [group(0, texts=("fine [b]\x1b[2J", "poor"), finish=Finish.LENGTH)])
    answers.close()
    console = Console(width=60, record=True, file=(tmp_path / "screen").open("w"))
    console.print(answers_panel(read_answers(tmp_path)[0]))
    shown = console.export_text()
    assert (
        shown.index("reward 2, format 0.5, 3 tokens, cut off")
        < shown.index("fine [b]·[2J")
        < shown.index("reward 1")
        < shown.index("poor")
    )


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give the folder of a run"):
        read_answers(tmp_path)
    write(tmp_path, 0, range(1, 4), groups=0)
    with pytest.raises(CheckpointError, match="save_samples = 0"):
        read_answers(tmp_path)
    write(tmp_path, 0, range(1, 4))
    with pytest.raises(CheckpointError, match="no step 9; it has 1 to 3"):
        read_answers(tmp_path, 9)
