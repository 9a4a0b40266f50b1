"""Display of a run: a panel that fits the terminal, or regular lines with the remaining time."""

import io
from typing import Any

import pytest
from rich.console import Console

from paceline.observe import display
from paceline.observe.display import Display
from paceline.rollout.engine import EngineStats
from paceline.types import Group, Prompt, Trajectory

GROUP = Group(
    0,
    Prompt("q", (1,), "a [b] prompt", {}),
    (Trajectory((), "a\x1b[2Jcompletion " * 20, 1.0),),
    0.0,
    0.0,
)
METRICS = {
    "reward/mean": 0.5,
    "staleness/mean": 0.0,
    "staleness/max": 0.0,
    "time/train_s": 6.0,
    "rollout/tokens": 500.0,
}


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr(display, "time", ticking)
    return ticking


def stats(tokens: int, busy_s: float) -> list[EngineStats]:
    return [
        EngineStats(tokens=tokens, busy_s=busy_s, running=0, waiting=0, version=0, paused=False)
    ]


def make_display(
    width: int = 200, terminal: bool = False, **settings: Any
) -> tuple[Display, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal, color_system=None)
    settings = {"steps": 100, "first_step": 0, "max_staleness": 2, **settings}
    return Display(console, "runs/[x]", **settings), written


def test_line_has_rates_of_whole_steps_and_remaining_time(clock: Clock) -> None:
    shown, written = make_display()
    with shown:
        clock.now += 4
        shown.engines_polled(stats(500, 4.0), 0.5)  # idle while the trainer trains
        clock.now += 6
        shown.step_done(1, METRICS, [GROUP])
    first, line = written.getvalue().splitlines()
    assert first == "runs/[x]: generating the first groups; 100 steps to train"
    assert line.endswith(
        "queue 50%  rollout busy 40%  train busy 60%  50 tokens/s  remaining 0:16:30"
    )


def test_line_warns_when_most_completions_are_truncated(clock: Clock) -> None:
    shown, written = make_display()
    clock.now += 1
    shown.step_done(1, METRICS | {"rollout/truncated_fraction": 0.4}, [GROUP])
    shown.step_done(2, METRICS | {"rollout/truncated_fraction": 0.9}, [GROUP])
    first, second = written.getvalue().splitlines()
    assert "truncated" not in first
    assert second.endswith("90% of completions truncated at rollout.max_response_length")


def test_display_prints_status_when_30_seconds_pass_without_output(clock: Clock) -> None:
    shown, written = make_display(first_step=10)
    with shown:
        for step in range(11, 19):
            clock.now += 20
            shown.engines_polled(stats(step, 0.0), 0.0)
            clock.now += 20
            shown.engines_polled(stats(step, 0.0), 0.0)
            shown.step_done(step, METRICS, [GROUP])
    lines = written.getvalue().splitlines()
    assert len(lines) >= 9 and "still running: 11 tokens generated, queue 0% full" in lines


@pytest.mark.parametrize("width", [40, 200])
def test_panel_fits_terminal_and_escapes_text_of_model(width: int, clock: Clock) -> None:
    shown, _ = make_display(width, terminal=True)
    written = io.StringIO()
    console = Console(file=written, width=width, color_system=None)
    console.print(shown._panel())
    clock.now += 1
    shown.step_done(1, METRICS, [GROUP])
    console.print(shown._panel())
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) == min(width, 88) and "\x1b" not in written.getvalue()
    assert "a [b] prompt" in written.getvalue() and "runs/[x]" in lines[0]
