"""The benchmark's plots, as SVG files beside its report. Needs matplotlib (extra `bench`)."""

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
    "trainer_hands_over": "hands over",
    "trainer_else": "else",
}
ROLLOUT = {
    "rollout_generates": "generates",
    "rollout_held": "held for a hand-over",
    "rollout_idle": "waits",
}
COLOURS = ("#2a6f97", "#e9c46a", "#e76f51", "#cccccc")


def draw(results: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """What each plot shows -> its file. A plot of which nothing was measured is left out."""
    cases = [case for case in results["cases"] if case["state"] == "ok"]
    same = [case for case in cases if case["comparable"]]
    plots = {
        "Samples per second": ("rate.svg", lambda: _rates(same)),
        "Where the time of both sides went": ("time.svg", lambda: _times(same)),
        "Staleness threshold: speed and age": (
            "staleness.svg",
            lambda: _staleness(rows_of("staleness", cases)),
        ),
        "Use of the queue": (
            "queue.svg",
            lambda: _queue([case for case in same if case["figures"]["max_staleness"] > 0]),
        ),
        "Memory over time": ("memory.svg", lambda: _memory(cases)),
    }
    drawn = {}
    for shows, (file, plot) in plots.items():
        if same and (figure := plot()) is not None:
            figure.tight_layout()
            figure.savefig(folder / file)
            pyplot.close(figure)
            drawn[shows] = file
    return drawn


def _rates(cases: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = _wide(len(cases))
    axes.barh(
        [case["name"] for case in cases],
        [case["figures"]["samples_per_s"] for case in cases],
        color=COLOURS[0],
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
        for (name, label), colour in zip(parts.items(), COLOURS, strict=False):
            shares = [case["figures"][name] for case in cases]
            axes.barh(
                [case["name"] for case in cases], shares, left=left, label=label, color=colour
            )
            left = [a + b for a, b in zip(left, shares, strict=True)]
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
    bounds = [case["figures"]["max_staleness"] for case in cases]
    axes.plot(bounds, [case["figures"]["samples_per_s"] for case in cases], "o-", color=COLOURS[0])
    axes.set(xlabel="schedule.max_staleness", ylabel="samples trained per second", ylim=(0, None))
    age = axes.twinx()
    age.plot(bounds, [case["figures"]["sample_age_s"] for case in cases], "s--", color=COLOURS[2])
    age.set(ylabel="mean age of a sample, s (dashed)", ylim=(0, None))
    return figure


def _queue(cases: Sequence[Mapping[str, Any]]) -> Any:
    if not cases:
        return None
    figure, axes = _wide(len(cases))
    axes.barh(
        [case["name"] for case in cases],
        [100 * case["figures"]["queue_use"] for case in cases],
        color=COLOURS[0],
    )
    axes.axvspan(100 * QUEUE_LOW, 100 * QUEUE_HIGH, color=COLOURS[1], alpha=0.4, zorder=0)
    axes.set(xlabel="mean use of the queue, % (band: 50–80 %)", xlim=(0, 100))
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
        ylabel="MB, all processes (GPUs where there are any)",
        ylim=(0, None),
    )
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def _wide(rows: int) -> Any:
    return pyplot.subplots(figsize=(8, 1.2 + 0.28 * rows))
