"""distributions.jsonl: staleness, lengths and rewards of the completions of each step.

Three kinds stand beside each other: completions that were generated since the last step, that were
trained in it, and that were dropped. If trained completions are shorter or better than generated
ones, training is biased, and this file shows it.
"""

from collections import Counter
from collections.abc import Sequence
from math import floor, log2
from pathlib import Path
from typing import Literal

from paceline.line_file import LineFile, end_of_step
from paceline.types import Group

NAME = "distributions.jsonl"
Kind = Literal["generated", "trained", "dropped"]


class Distributions:
    """Writer of one line per step: counts of completions by value, for each kind and measure."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        path = run_dir / NAME
        # Steps after the checkpoint are trained again.
        self._file = LineFile(path, end_of_step(path, first_step))
        self._counts: dict[str, dict[str, Counter[str]]] = {}

    def add(self, kind: Kind, groups: Sequence[Group], version: int) -> None:
        """Count the completions of groups; `version` is the trainer's."""
        measures = self._counts.setdefault(
            kind, {"staleness": Counter(), "length": Counter(), "reward": Counter()}
        )
        for group in groups:
            for trajectory in group.trajectories:
                # The engines may have new weights a moment before the step is recorded.
                measures["staleness"][str(max(0, version - trajectory.version_min))] += 1
                measures["length"][str(length_bin(trajectory.num_tokens))] += 1
                measures["reward"][f"{trajectory.total_reward:.2g}"] += 1

    def step_done(self, step: int, groups: Sequence[Group]) -> None:
        """Write the counts since the last step. Step n is trained from version n - 1."""
        self.add("trained", groups, step - 1)
        self._file.write({"step": step, **self._counts})
        self._file.flush()
        self._counts = {}

    def close(self) -> None:
        self._file.close()


def length_bin(tokens: int) -> int:
    """Return the smallest length of the bin: every length up to 8, then four bins per doubling."""
    if tokens <= 8:
        return tokens
    exponent = floor(log2(tokens))
    width = 2 ** (exponent - 2)
    return tokens // width * width
