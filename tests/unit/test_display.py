"""What a person sees of a run: a panel that fits the terminal, or lines that come often enough and tell how long it takes."""

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
    (Trajectory((), "an\x1b[2Janswer " * 20, 1.0),),
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


def made(width: int = 200, terminal: bool = False, **settings: Any) -> tuple[Display, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal, color_system=None)
    return Display(
        console, "runs/[x]", **{"steps": 100, "first_step": 0, "max_staleness": 2, **settings}
    ), written


def test_lines_tell_the_rates_of_whole_steps_and_the_time_left(clock: Clock) -> None:
    shown, written = made()
    with shown:
        clock.now += 4
        shown.engines_polled(stats(500, 4.0), 0.5)  # then it rests while the trainer trains
        clock.now += 6
        shown.step_done(1, METRICS, [GROUP])
    first, line = written.getvalue().splitlines()
    assert first == "runs/[x]: the first groups are being generated; 100 steps to make"
    assert line.endswith("queue 50%  rollout busy 40%  train busy 60%  50 tokens/s  left 0:16:30")


def test_answers_that_are_mostly_cut_off_are_told(clock: Clock) -> None:
    shown, written = made()
    clock.now += 1
    shown.step_done(1, METRICS | {"rollout/truncated_fraction": 0.4}, [GROUP])
    shown.step_done(2, METRICS | {"rollout/truncated_fraction": 0.9}, [GROUP])
    first, second = written.getvalue().splitlines()
    assert "cut off" not in first and second.endswith(
        "90% of answers cut off at rollout.max_response_length"
    )


def test_no_silence_is_long(clock: Clock) -> None:
    shown, written = made(first_step=10)
    with shown:
        for step in range(11, 19):
            clock.now += 20
            shown.engines_polled(stats(step, 0.0), 0.0)
            clock.now += 20
            shown.engines_polled(stats(step, 0.0), 0.0)
            shown.step_done(step, METRICS, [GROUP])
    lines = written.getvalue().splitlines()
    assert len(lines) >= 9 and "still at it: 11 tokens generated so far, queue 0%" in lines


@pytest.mark.parametrize("width", [40, 200])
def test_the_panel_fits_the_terminal_and_a_models_text_does_not_control_it(
    width: int, clock: Clock
) -> None:
    shown, _ = made(width, terminal=True)
    written = io.StringIO()
    console = Console(file=written, width=width, color_system=None)
    console.print(shown._panel())
    clock.now += 1
    shown.step_done(1, METRICS, [GROUP])
    console.print(shown._panel())
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) == min(width, 88) and "\x1b" not in written.getvalue()
    assert "a [b] prompt" in written.getvalue() and "runs/[x]" in lines[0]
