"""SVG plots of the performance report. Needs matplotlib (extra `bench`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from benchmarks.suite.criteria import MB, QUEUE_HIGH, QUEUE_LOW
from benchmarks.suite.report import rows_of

TRAINER = {
    "trainer_trains": "trains",
    "trainer_waits": "waits for samples",
    "trainer_syncs": "syncs weights",
    "trainer_other": "other",
}
ROLLOUT = {
    "rollout_generates": "generates",
    "rollout_paused": "paused for weight sync",
    "rollout_idle": "waits",
}
COLORS = ("#2a6f97", "#e9c46a", "#e76f51", "#cccccc")


def draw_plots(results: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Write the plots and return the file of each title; a plot without data is left out."""
    cases = [case for case in results["cases"] if case["state"] == "ok"]
    same = [case for case in cases if case["comparable"]]
    plots = {
        "Samples per second": ("rate.svg", lambda: _rates(same)),
        "Time of trainer and engines": ("time.svg", lambda: _times(same)),
        "Staleness threshold: speed and age": (
            "staleness.svg",
            lambda: _staleness(rows_of("staleness", cases)),
        ),
        "Queue utilization": (
            "queue.svg",
            lambda: _queue([case for case in same if case["metrics"]["max_staleness"] > 0]),
        ),
        "Memory over time": ("memory.svg", lambda: _memory(cases)),
    }
    drawn = {}
    for title, (file, plot) in plots.items():
        if same and (figure := plot()) is not None:
            figure.tight_layout()
            figure.savefig(directory / file)
            pyplot.close(figure)
            drawn[title] = file
    return drawn


def _rates(cases: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = _bar_axes(len(cases))
    axes.barh(
        [case["name"] for case in cases],
        [case["metrics"]["samples_per_s"] for case in cases],
        color=COLORS[0],
    )
    for row, case in enumerate(cases):
        axes.plot(case["rounds"], [row] * len(case["rounds"]), "k|")
    axes.set(xlabel="samples trained per second (marks: rounds)")
    axes.invert_yaxis()
    return figure


def _times(cases: Sequence[Mapping[str, Any]]) -> Any:
    height = 1.5 + 0.28 * len(cases)
    figure, sides = pyplot.subplots(1, 2, figsize=(11, height), sharey=True)
    for axes, parts, title in zip(sides, (TRAINER, ROLLOUT), ("trainer", "rollout"), strict=True):
        left = [0.0] * len(cases)
        for (name, label), color in zip(parts.items(), COLORS, strict=False):
            fractions = [case["metrics"][name] for case in cases]
            axes.barh(
                [case["name"] for case in cases], fractions, left=left, label=label, color=color
            )
            left = [a + b for a, b in zip(left, fractions, strict=True)]
        axes.set(xlim=(0, 1), title=title)
        axes.legend(
            fontsize=7,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.5 / height),
            ncols=4,
            frameon=False,
        )
    sides[0].invert_yaxis()
    return figure


def _staleness(cases: Sequence[Mapping[str, Any]]) -> Any:
    if len(cases) < 2:
        return None
    figure, axes = pyplot.subplots(figsize=(6.5, 3.5))
    bounds = [case["metrics"]["max_staleness"] for case in cases]
    axes.plot(bounds, [case["metrics"]["samples_per_s"] for case in cases], "o-", color=COLORS[0])
    axes.set(xlabel="schedule.max_staleness", ylabel="samples trained per second", ylim=(0, None))
    age = axes.twinx()
    age.plot(bounds, [case["metrics"]["sample_age_s"] for case in cases], "s--", color=COLORS[2])
    age.set(ylabel="mean age of a sample, s (dashed)", ylim=(0, None))
    return figure


def _queue(cases: Sequence[Mapping[str, Any]]) -> Any:
    if not cases:
        return None
    figure, axes = _bar_axes(len(cases))
    axes.barh(
        [case["name"] for case in cases],
        [100 * case["metrics"]["queue_utilization"] for case in cases],
        color=COLORS[0],
    )
    axes.axvspan(100 * QUEUE_LOW, 100 * QUEUE_HIGH, color=COLORS[1], alpha=0.4, zorder=0)
    axes.set(xlabel="mean queue utilization, % (band: 50–80 %)", xlim=(0, 100))
    axes.invert_yaxis()
    return figure


def _memory(cases: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 3.8))
    for case in cases:
        series = case["memory"][0]
        gpu = any(series["gpu"])
        axes.plot(
            series["seconds"],
            [value / MB for value in series["gpu" if gpu else "host"]],
            linewidth=1,
            label=case["name"],
        )
    axes.set(
        xlabel="seconds after the warm-up",
        ylabel="MB, all processes (GPU memory if GPUs are used)",
        ylim=(0, None),
    )
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def _bar_axes(rows: int) -> Any:
    return pyplot.subplots(figsize=(8, 1.2 + 0.28 * rows))
