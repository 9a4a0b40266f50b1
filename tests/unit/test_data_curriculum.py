"""Curricula: the order of rows follows rewards, and the state survives a restart."""

from pathlib import Path
from typing import Any

import pytest

from paceline.data.curriculum import Adaptive
from paceline.data.prompts import DataSettings, PromptSource
from paceline.data.tiny import make_tokenizer
from paceline.errors import ConfigError, DataError
from paceline.types import Group, Trajectory

CUSTOM = """
import numpy

class Hardest:
    def __init__(self, num_rows, seed):
        self.worst = 0
    def pick(self, seq):
        return self.worst
    def observe(self, row, rewards):
        self.worst = row + 1
    def state(self):
        return {"worst": self.worst}
    def load_state(self, state):
        self.worst = state["worst"]

class Numpy(Hardest):
    def pick(self, seq):
        return numpy.argmax([0, 0, 1])

class Broken(Hardest):
    def pick(self, seq):
        return "first"

class Beyond(Hardest):
    def pick(self, seq):
        return 20

class Incomplete:
    def __init__(self, num_rows, seed): ...
    def pick(self, seq): ...

class Failing(Hardest):
    def __init__(self, num_rows):
        super().__init__(num_rows, 0)

class FailingPick(Hardest):
    def pick(self, seq):
        raise KeyError(seq)

class Leaving(Hardest):
    def observe(self, row, rewards):
        raise SystemExit(0)

class Unsaved(Hardest):
    def state(self):
        return {"worst": {1, 2}}
"""


def make(tmp_path: Path, name: str) -> PromptSource:
    (tmp_path / "custom.py").write_text(CUSTOM)
    settings = DataSettings(
        task="copy:3", limit=20, curriculum=name.replace("CUSTOM", str(tmp_path / "custom.py"))
    )
    return PromptSource(settings, make_tokenizer(), 0)


def group(source: PromptSource, seq: int, reward: float) -> Group:
    return Group(seq, source[seq], (Trajectory((), "", reward),), 0.0, 0.0)


def test_custom_curriculum_picks_rows_and_restores_state(tmp_path: Path) -> None:
    source = make(tmp_path, "CUSTOM:Hardest")
    first = source[0]
    source.observe([group(source, 0, 1.0)])
    assert source[0].uid != first.uid
    state: dict[str, Any] = source.state()
    again = make(tmp_path, "CUSTOM:Hardest")
    again.load_state(state)
    assert again[0] == source[0]


def test_custom_curriculum_may_pick_rows_with_numpy(tmp_path: Path) -> None:
    source = make(tmp_path, "CUSTOM:Numpy")
    assert source[0].uid == "copy:3:2"


def test_failure_of_custom_curriculum_names_setting_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"custom\.py:Failing': creating it raised TypeError: "):
        make(tmp_path, "CUSTOM:Failing")
    with pytest.raises(DataError, match=r"pick\(\) raised KeyError: 3 \(custom\.py:\d+\)"):
        make(tmp_path, "CUSTOM:FailingPick")[3]
    source = make(tmp_path, "CUSTOM:Leaving")
    with pytest.raises(DataError, match=r"observe\(\) raised SystemExit: 0 \(custom\.py:\d+\)"):
        source.observe([group(source, 0, 1.0)])
    with pytest.raises(DataError, match=r"Unsaved': state\(\) is saved .* expected JSON values"):
        make(tmp_path, "CUSTOM:Unsaved").state()


def test_adaptive_prefers_rows_that_are_sometimes_solved() -> None:
    curriculum = Adaptive(10, seed=0)
    for row in range(10):
        curriculum.observe(row, [0.5, 0.5] if row == 7 else [1.0, 1.0])
    picks = [curriculum.pick(seq) for seq in range(200)]
    assert picks.count(7) > 50 and picks == [curriculum.pick(seq) for seq in range(200)]


def test_invalid_curriculum_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="picked row 'first'; expected an integer from 0 to 19"):
        make(tmp_path, "CUSTOM:Broken")[0]
    with pytest.raises(DataError, match="picked row 20; expected an integer from 0 to 19"):
        make(tmp_path, "CUSTOM:Beyond")[0]
    with pytest.raises(ConfigError, match="no method 'observe'"):
        make(tmp_path, "CUSTOM:Incomplete")
    with pytest.raises(ConfigError, match="expected 'adaptive'"):
        make(tmp_path, "easy")
