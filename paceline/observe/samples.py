"""What the model said: samples.jsonl holds some prompts of every step with all answers and their rewards, for people to read.

Figures can look well while the answers do not (a reward that is fooled, answers cut off, one phrase over and over).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.panel import Panel
from rich.text import Text

from paceline.errors import CheckpointError
from paceline.types import Group, Trajectory

NAME = "samples.jsonl"


class Samples:
    """Writes the first `groups` groups of each step, one a line."""

    def __init__(self, folder: Path, groups: int, first_step: int) -> None:
        self._groups = groups
        path = folder / NAME
        with path.with_suffix(".tmp").open(
            "w", encoding="utf-8"
        ) as kept:  # what came after the checkpoint is made again
            kept.writelines(line for line, step in _lines(path) if step <= first_step)
        path.with_suffix(".tmp").replace(path)
        self._file = path.open(
            "a", encoding="utf-8", errors="backslashreplace"
        )  # half a surrogate, as JSON writes it

    def step_done(self, step: int, groups: Sequence[Group]) -> None:
        for group in groups[: self._groups]:
            self._file.write(json.dumps(_row(step, group), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_answers(folder: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The groups written for a step; without one, for the last."""
    path = folder / NAME
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give the folder of a run, for example runs/fully_async"
        )
    steps = [at for _, at in _lines(path)]
    if not steps:
        raise CheckpointError(f"{path} is empty: no step is done yet, or save_samples = 0")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise CheckpointError(f"{path} has no step {wanted}; it has {steps[0]} to {steps[-1]}")
    return [json.loads(line) for line, at in _lines(path) if at == wanted]


def answers_panel(row: dict[str, Any]) -> Panel:
    """A prompt and the answers to it, best first."""
    parts: list[Text] = [Text(_printable(row["prompt"]), style="bold")]
    for answer in sorted(row["answers"], key=lambda answer: -answer["reward"]):
        cut = ", cut off" if answer["finish"] == "length" else ""
        details = "".join(f", {name} {value:g}" for name, value in answer["details"].items())
        parts.append(
            Text(
                f"\nreward {answer['reward']:g}{details}, {answer['tokens']} tokens{cut}",
                style="cyan",
            )
        )
        parts.append(Text(_printable(answer["text"])))
    return Panel(
        Lines(*parts),
        title=f"step {row['step']}: {row['uid']}, {row['staleness']} steps old",
        title_align="left",
    )


def _printable(text: str) -> str:
    """A model's text must not control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text.strip())


def _row(step: int, group: Group) -> dict[str, Any]:
    return {
        "step": step,
        "seq": group.seq,
        "uid": group.prompt.uid,
        "staleness": step - 1 - group.version_min,  # a step is done when its version is one higher
        "prompt": group.prompt.text,
        "answers": [_answer(trajectory) for trajectory in group.trajectories],
    }


def _answer(trajectory: Trajectory) -> dict[str, Any]:
    last = trajectory.turns[-1].completion
    return {
        "reward": trajectory.total_reward,
        "details": dict(trajectory.details),
        "tokens": trajectory.num_tokens,
        "finish": last.finish.value,
        "text": trajectory.text,
    }


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Each line and its step; without the last one if a crash has cut it off."""
    if path.exists():
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from (
                (line, int(json.loads(line)["step"])) for line in file if line.endswith("\n")
            )
