"""The stages of a start: shown on a terminal with the seconds they take, and nowhere else."""

import io
import re

import pytest

from paceline.observe import terminal
from paceline.observe.console import RunConsole
from paceline.observe.terminal import StartTerminal
from paceline.progress import listening, stage


def shown(is_terminal: bool) -> str:
    console = RunConsole(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with StartTerminal(console):
        stage("reading prompts[0].jsonl\x1b")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_terminal_shows_what_start_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "MIN_SHOWN_S", 0.0)
    assert re.search(r"reading prompts\[0\].jsonl\\u001b … \d+ s", shown(is_terminal=True))


def test_short_stage_has_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "MIN_SHOWN_S", 1e9)
    assert "reading prompts[0].jsonl\\u001b …\n" in shown(is_terminal=True)


def test_output_that_is_no_terminal_has_no_stages() -> None:
    assert "reading" not in shown(is_terminal=False)


def test_stage_reaches_no_listener_that_has_left() -> None:
    seen: list[str] = []
    with listening(seen.append):
        stage("one")
    stage("two")
    assert seen == ["one"]
