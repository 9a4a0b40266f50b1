"""samples.jsonl: each step is saved once, also after a crash, and is shown readably."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from paceline.errors import CheckpointError
from paceline.line_file import intact_rows
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


def open_samples(folder: Path, groups: int = 1, first_step: int = 0) -> Samples:
    return Samples(folder, groups, first_step, lambda tokens: "".join(map(chr, tokens)))


def tokens(text: str) -> Completion:
    size = len(text)
    ids = np.array([ord(c) for c in text], np.int32)
    return Completion(ids, np.zeros(size, np.float32), np.zeros(size, np.int32), Finish.STOP)


def conversation() -> Group:
    """Return a group with a trajectory of three turns, the last of which has a reward."""
    said = [("Q", "ask \x1b[2J", 0.0), ("tool: 4", "again", 0.0), ("tool: 5", "it is 5", 0.5)]
    turns = tuple(Turn(tuple(map(ord, p)), tokens(text), reward) for p, text, reward in said)
    prompt = Prompt("row:0", (ord("Q"),), "Q", {})
    return Group(0, prompt, (Trajectory(turns, "it is 5", reward=1.0),), 0.0, 0.0)


def test_saved_tokens_have_advantages_of_batch(tmp_path: Path) -> None:
    """The batch has the groups in order of their numbers, with prompts between completions."""
    talk = conversation()
    first = replace(talk, seq=2, trajectories=talk.trajectories * 2)
    second = replace(talk, seq=1)
    sizes = [(len(t.prompt), len(t.completion)) for t in talk.trajectories[0].turns]
    values: list[float] = []
    for row in range(3):  # of group 1, then two of group 2
        for number, (prompt, completion) in enumerate(sizes):
            values += [9.0] * prompt + [row + number / 10] * completion
    samples = Samples(
        tmp_path, 1, 0, lambda ids: "".join(map(chr, ids)), lambda: np.array(values, np.float32)
    )
    (row,) = samples.step_done(1, [first, second])
    found = [[turn["advantages"] for turn in sample["turns"]] for sample in row["completions"]]
    lengths = [completion for _, completion in sizes]
    assert found == [
        [[[base, lengths[0]]], [[base + 0.1, lengths[1]]], [[base + 0.2, lengths[2]]]]
        for base in (1.0, 2.0)
    ]


def shown(folder: Path) -> str:
    console = Console(width=60, record=True, file=(folder / "screen").open("w"))
    console.print(samples_panel(read_samples(folder)[0]))
    return console.export_text()


def write(folder: Path, first_step: int, steps: range, groups: int = 1) -> None:
    samples = open_samples(folder, groups, first_step)
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


def test_samples_skip_damaged_line_when_run_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 0, range(1, 5))
    path = tmp_path / NAME
    content = path.read_bytes()
    for damage in (b'"s\xfdep"', b'"stap"', b"[]"):
        path.write_bytes(content.replace(b'"step"', damage, 1))
        caplog.clear()
        write(tmp_path, 3, range(4, 5))
        assert f"{path}: line 1 is damaged" in caplog.text
        assert [row["step"] for row in intact_rows(path)] == [2, 3, 4]
        assert read_samples(tmp_path, 3)[0]["seq"] == 6


@pytest.mark.parametrize("line", ['{"step": 1}', '{"step": 1, "prompt": 3, "completions": 7}'])
def test_panel_fails_with_cause_when_line_without_checksum_is_damaged(
    line: str, tmp_path: Path
) -> None:
    (tmp_path / NAME).write_text(line + "\n")
    with pytest.raises(CheckpointError, match=r"samples.jsonl: a line of step 1 is damaged"):
        shown(tmp_path)


def test_samples_preserve_any_text(tmp_path: Path) -> None:
    text = "two\nlines\r\n\u2028 and \u0085 \x1b[31m [bold]marks[/] 日本語 🙂 \ud800"
    samples = open_samples(tmp_path)
    samples.step_done(1, [group(0, texts=(text,))])
    samples.close()
    (row,) = read_samples(tmp_path)
    assert row["completions"][0]["text"] == text


def test_panel_shows_best_completion_first_and_marks_truncated(tmp_path: Path) -> None:
    samples = open_samples(tmp_path)
    samples.step_done(1, [group(0, texts=("fine [b]\x1b[2J", "poor"), finish=Finish.LENGTH)])
    samples.close()
    text = shown(tmp_path)
    assert (
        text.index("reward 2, format 0.5, 3 tokens, truncated")
        < text.index("fine [b]\\u001b[2J")
        < text.index("reward 1")
        < text.index("poor")
    )


def test_panel_shows_every_turn_of_conversation_in_order(tmp_path: Path) -> None:
    samples = open_samples(tmp_path)
    samples.step_done(1, [conversation()])
    samples.close()
    (sample,) = read_samples(tmp_path)[0]["completions"]
    assert sample["reward"] == 1.5 and sample["text"] == "it is 5"
    shown_keys = ("prompt", "text", "reward")
    assert [{key: turn[key] for key in shown_keys} for turn in sample["turns"]] == [
        {"prompt": "", "text": "ask \x1b[2J", "reward": 0.0},
        {"prompt": "tool: 4", "text": "again", "reward": 0.0},
        {"prompt": "tool: 5", "text": "it is 5", "reward": 0.5},
    ]
    lines = [line.strip("│ ") for line in shown(tmp_path).splitlines()]
    assert lines[1:-1] == [
        "Q",
        "",
        "reward 1.5, 20 tokens",
        "turn 1: ask \\u001b[2J",
        "environment: tool: 4",
        "turn 2: again",
        "environment: tool: 5",
        "turn 3 (reward 0.5): it is 5",
    ]


def test_panel_shows_where_context_was_rewritten_and_agent(tmp_path: Path) -> None:
    split = replace(conversation().trajectories[0], agent="solver")
    turns = (split.turns[0], replace(split.turns[1], restarts=True), split.turns[2])
    single = Trajectory((Turn((63,), tokens("7")),), "7", 0.0, agent="asker")
    samples = open_samples(tmp_path)
    trajectories = (replace(split, turns=turns), single)
    samples.step_done(1, [replace(conversation(), trajectories=trajectories)])
    samples.close()
    lines = [line.strip("│ ") for line in shown(tmp_path).splitlines()]
    assert lines[3:-1] == [
        "solver: reward 1.5, 20 tokens",
        "turn 1: ask \\u001b[2J",
        "context rewritten: new sample",
        "context: tool: 4",
        "turn 2: again",
        "environment: tool: 5",
        "turn 3 (reward 0.5): it is 5",
        "",
        "asker: reward 0, 1 tokens",
        "context: ?",
        "turn 1: 7",
    ]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_read_samples_fails_with_cause_when_disk_cannot_read_file(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"samples.jsonl cannot be read: Input/output error"):
        read_samples(tmp_path)


def test_read_samples_fails_when_file_or_step_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; expected a run directory"):
        read_samples(tmp_path)
    write(tmp_path, 0, range(1, 4), groups=0)
    with pytest.raises(CheckpointError, match="save_samples = 0"):
        read_samples(tmp_path)
    write(tmp_path, 0, range(1, 4))
    with pytest.raises(CheckpointError, match="no step 9; it has 1 to 3"):
        read_samples(tmp_path, 9)
