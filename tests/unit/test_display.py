"""Display of a run: a panel that fits the terminal, or regular lines with the remaining time."""

import io
from typing import Any

import pytest

from paceline.observe import display
from paceline.observe.console import RunConsole
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


def stats(tokens: int, busy_s: float, age_s: float = 0.0) -> list[EngineStats]:
    return [EngineStats(0, 0, 0, tokens, busy_s, paused=False, age_s=age_s)]


def busy(line: str) -> str:
    """Return what a line says about the engines."""
    return line.partition("rollout busy ")[2].partition("  ")[0]


def make_display(
    width: int = 200, terminal: bool = False, **settings: Any
) -> tuple[Display, io.StringIO]:
    written = io.StringIO()
    console = RunConsole(file=written, width=width, force_terminal=terminal, color_system=None)
    settings = {"steps": 100, "first_step": 0, "max_staleness": 2, **settings}
    return Display(console, "runs/[x]", **settings), written


def test_line_has_rates_of_whole_steps_and_remaining_time(clock: Clock) -> None:
    shown, written = make_display(max_staleness=0)
    with shown:
        shown.engines_polled(stats(0, 0.0), 0.0)
        clock.now += 4
        shown.engines_polled(stats(500, 4.0, age_s=4.0), 0.5)  # idle while the trainer trains
        clock.now += 6
        shown.step_done(1, METRICS, [GROUP])
    first, line = written.getvalue().splitlines()
    assert first == "runs/[x]: generating the first groups; 100 steps to train"
    assert line.endswith(
        "queue 50%  rollout busy 40%  train busy 60%  50 tokens/s  remaining 0:16:30"
    )


def test_line_and_panel_have_kl_to_teacher(clock: Clock) -> None:
    for terminal, expected in ((False, "reward 0.500  KL 0.125  "), (True, "KL to teacher  0.125")):
        shown, written = make_display(terminal=terminal)
        shown.step_done(1, METRICS | {"distill/kl": 0.125}, [GROUP])
        if terminal:
            shown._console.print(shown._panel())
        assert expected in written.getvalue()


def test_every_line_has_rates_of_latest_steps(clock: Clock) -> None:
    shown, written = make_display(max_staleness=0)
    for step in range(1, 41):
        clock.now += 1
        shown.engines_polled(stats(step, min(step, 20) * 0.5, age_s=step), 0.0)
        shown.step_done(step, METRICS | {"time/train_s": 0.01 * step}, [GROUP])
    lines = written.getvalue().splitlines()
    assert [line.split("train busy ")[1].split("  ")[0] for line in lines] == (
        ["1%", "2%", "2%", "8%", "18%", "28%", "38%"]  # steps 1, 2, 3, 10, 20, 30, 40
    )
    assert [busy(line) for line in lines[-3:]] == ["50%", "0%", "0%"]


def test_line_has_rate_between_reports_when_last_one_is_older_than_step(clock: Clock) -> None:
    shown, written = make_display(max_staleness=2)
    clock.now += 0.5
    shown.step_done(1, METRICS, [GROUP])
    shown.engines_polled(stats(0, 0.0, age_s=30.0), 0.0)  # reported at the start
    clock.now += 0.4
    shown.step_done(2, METRICS, [GROUP])
    shown.engines_polled(stats(90, 0.9, age_s=31.0), 0.0)
    clock.now += 0.9
    shown.step_done(3, METRICS, [GROUP])
    clock.now += 4
    shown.step_done(10, METRICS, [GROUP])  # five seconds after the first steps
    said = [busy(line) for line in written.getvalue().splitlines()]
    assert said == ["", "", "90%", "90%"]


def test_line_leaves_out_rollout_when_there_is_one_report_in_mid_step(clock: Clock) -> None:
    shown, written = make_display(max_staleness=0)
    clock.now += 1
    for _ in range(3):  # the same report again is not a second one
        shown.engines_polled(stats(0, 0.0, age_s=0.03), 0.0)
    clock.now += 9
    shown.step_done(1, METRICS | {"time/wait_s": 4.0}, [GROUP])
    (line,) = written.getvalue().splitlines()
    assert "  queue 0%  train busy 60%  50 tokens/s" in line and "rollout" not in line


@pytest.mark.parametrize("reported_s", [1.5, 3.9, 4.5, 9.9])
def test_line_counts_idle_phases_when_reports_are_in_any_phase(
    reported_s: float, clock: Clock
) -> None:
    """A synchronous step generates for 4 seconds and trains for 6."""
    shown, written = make_display(max_staleness=0)
    started = clock.now
    shown.engines_polled(stats(0, 0.0, age_s=0.01), 0.0)
    for step in range(1, 4):
        clock.now = started + 10 * (step - 1) + reported_s
        generated = 4.0 * (step - 1) + min(4.0, reported_s)
        shown.engines_polled(stats(0, generated, age_s=clock.now - started), 0.0)
        clock.now = started + 10 * step
        shown.step_done(step, METRICS | {"time/wait_s": 4.0}, [GROUP])
    assert [busy(line) for line in written.getvalue().splitlines()] == ["40%"] * 3


def test_line_counts_idle_phases_when_reports_are_rarer_than_steps(clock: Clock) -> None:
    shown, written = make_display(max_staleness=0)
    started = clock.now
    for step in range(1, 41):  # 0.2 seconds of generation, 0.3 of training
        clock.now = started + 0.5 * (step - 1) + 0.1
        if step % 3 == 1:
            age_s, generated = clock.now - started, 0.2 * (step - 1) + 0.1
            shown.engines_polled(stats(0, generated, age_s=age_s), 0.0)
        clock.now = started + 0.5 * step
        shown.step_done(step, METRICS | {"time/wait_s": 0.2}, [GROUP])
    said = [busy(line) for line in written.getvalue().splitlines()]
    assert said == ["", "", "", "40%", "40%", "40%", "40%"]


def test_line_leaves_out_rollout_until_new_engine_has_reported_twice(clock: Clock) -> None:
    shown, written = make_display()
    for step, (busy_s, age_s) in enumerate([(5.0, 10.0), (6.0, 12.0), (0.5, 1.0), (1.0, 2.0)], 7):
        clock.now += 2
        shown.engines_polled(stats(0, busy_s, age_s), 0.0)
        shown.step_done(10 * step, METRICS, [GROUP])
    assert [busy(line) for line in written.getvalue().splitlines()] == ["", "50%", "", "50%"]


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
    console = RunConsole(file=written, width=width, color_system=None)
    console.print(shown._panel())
    clock.now += 1
    shown.step_done(1, METRICS, [GROUP])
    console.print(shown._panel())
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) == min(width, 88) and "\x1b" not in written.getvalue()
    assert "a [b] prompt" in written.getvalue() and "runs/[x]" in lines[0]


def printed_summary(run_dir: str, **further: Any) -> str:
    ledger = {"issued": 2, "trained": 2, "outstanding": 0, "dropped": {}}
    rates = ("steps", "steps_per_s", "samples_per_s", "tokens_per_s", "staleness_mean")
    rates += ("mean_sample_age_s", "sync_latency_s", "rollout_busy_fraction", "reward_first")
    rates += ("train_busy_fraction", "reward_last", "staleness_max", "memory_peak_bytes")
    written = io.StringIO()
    summary = {**dict.fromkeys(rates, 1), "ledger": ledger, **further}
    display.print_summary(RunConsole(file=written, width=100), summary, run_dir)
    return written.getvalue()


def test_summary_quotes_run_directory_in_command() -> None:
    assert "paceline samples 'my runs/x'" in printed_summary("my runs/x")


def test_summary_shows_memory_of_each_rank_and_phase() -> None:
    phases = {"generate": 3 << 30, "rank_0_generate": 3 << 30, "rank_1_generate": 1 << 30}
    phases["rank_1_train"] = 2 << 30
    planned = {"generate": (3 << 30, 3 << 30), "train": (1 << 30, 4 << 30)}
    text = printed_summary("runs/x", memory_phases=phases, memory_planned=planned)
    assert "memory of rank 0, GiB" in text and "generate 1.00, train 2.00" in text
    assert "memory planned, GiB" in text and "generate 3.00, train 1.00 to 4.00" in text
