"""Make the drawings of docs/concepts.md: python docs/drawings.py [--record]

They show a real run, whose events are in drawings.json, and the plans of recipes. The same data
gives the same files. `--record` trains for a few seconds and replaces the data first.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from paceline.config import load_config
from paceline.workers.cluster import parse_nodes
from paceline.workers.pools import plan_workers

HERE = Path(__file__).parent
DATA = HERE / "drawings.json"
IMAGES = HERE / "images"
SETTINGS = (
    *("steps=8", "groups_per_step=4", "group_size=4", "data.task=reverse:40"),
    *("rollout.max_response_length=64", "rollout.slots=16", "trace=true", "save_samples=4"),
)
GROUPS_PER_STEP, MAX_STALENESS = 4, 2
CAPACITY = (MAX_STALENESS + 1) * GROUPS_PER_STEP
WIDTH, LEFT, RIGHT = 860, 90, 770  # of a drawing, and of its time axis
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
GENERATED, QUEUED, TRAINED, SYNCED = "#4c78a8", "#c9d6e8", "#f58518", "#54a24b"


def record() -> dict[str, Any]:
    """Train, and return the events of the run in milliseconds after its first one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "train", "fully_async", *SETTINGS]
        subprocess.run([*command, f"run_dir={folder}/run", "--fresh"], check=True)
        trace, ledger, samples = (
            [
                json.loads(line)
                for line in Path(folder, "run", f"{name}.jsonl").read_text().splitlines()
            ]
            for name in ("trace", "ledger", "samples")
        )
    spans = [row for row in trace if "thread" in row]
    start = min(row["at"] for row in spans if row["process"] == "groups")

    def span(row: dict[str, Any]) -> list[float]:
        return [round(1000 * (row["at"] - start), 1), round(1000 * row["s"], 1)]

    groups: dict[str, dict[str, Any]] = {}
    for row in spans:
        if row["process"] == "groups" and row["name"] in ("generated", "queued", "trained"):
            groups.setdefault(row["thread"], {})[row["name"]] = span(row)
    for row in ledger:
        if row["event"] == "trained":
            groups[str(row["seq"])]["staleness"] = row["staleness"]
    tasks = [row for row in spans if row["process"] == "controller"]
    return {
        "groups": groups,
        "phases": [[row["name"], *span(row)] for row in tasks if row["name"] in ("train", "sync")],
        "completions": [
            [completion["versions"] for completion in row["completions"]] for row in samples
        ],
    }


class Drawing:
    """An SVG file with rectangles, lines and text."""

    def __init__(self, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="sans-serif" font-size="13" fill="#222"><title>{escape(title)}</title>',
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {size} rx="2" fill="{color}"/>')

    def line(self, points: Iterable[tuple[float, float]], color: str, dashes: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'stroke="{color}" stroke-width="1.5" stroke-dasharray="{dashes}"'
        self._parts.append(f'<polyline points="{path}" fill="none" {style}/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}>{escape(text)}</text>")

    def legend(self, y: float, names: Sequence[tuple[str, str]]) -> None:
        x = float(LEFT)
        for color, name in names:
            self.box(x, y - 10, 12, 12, color)
            self.text(x + 18, y, name)
            x += 40 + 7.2 * len(name)

    def save(self, name: str) -> None:
        text = "\n".join([*self._parts, "</svg>\n"])
        (IMAGES / f"{name}.svg").write_text(text, encoding="utf-8")


class Axis:
    """Milliseconds to columns."""

    def __init__(self, end: float) -> None:
        self._scale = (RIGHT - LEFT) / end

    def __call__(self, ms: float) -> float:
        return LEFT + ms * self._scale


def ends_of(data: dict[str, Any], phase: str) -> list[float]:
    return [begun + lasted for name, begun, lasted in data["phases"] if name == phase]


def draw_staleness(data: dict[str, Any]) -> None:
    groups = [group for _, group in sorted(data["groups"].items(), key=lambda item: int(item[0]))]
    groups = [group for group in groups if "staleness" in group]
    syncs = ends_of(data, "sync")
    axis, bottom = Axis(syncs[-1]), 40 + 11 * len(groups)
    drawing = Drawing(bottom + 50, "Life of each group in a fully async run")
    for version, at in enumerate(syncs, 1):
        drawing.line([(axis(at), 26), (axis(at), bottom)], SYNCED, "4 3")
        drawing.text(axis(at), 20, f"v{version}", "middle")
    for row, group in enumerate(groups):
        y = 34 + 11 * row
        for color, stage in ((GENERATED, "generated"), (QUEUED, "queued"), (TRAINED, "trained")):
            begun, lasted = group[stage]
            end = min(begun + lasted, syncs[-1])
            drawing.box(axis(begun), y, axis(end) - axis(begun), 8, color)
        if row % GROUPS_PER_STEP == 0:
            drawing.text(LEFT - 8, y + 10, f"groups {row}–{row + 3}", "end")
            drawing.text(RIGHT + 8, y + 10, f"staleness {group['staleness']}")
    names = ((GENERATED, "generation"), (QUEUED, "queue"), (TRAINED, "training and weight sync"))
    drawing.legend(bottom + 30, [*names, (SYNCED, "version live on the engine")])
    drawing.save("staleness")


def draw_admission(data: dict[str, Any]) -> None:
    syncs = ends_of(data, "sync")
    changes = [(group["generated"][0], 1) for group in data["groups"].values()]
    changes += [(at, -GROUPS_PER_STEP) for at in syncs]
    axis, top, unit = Axis(syncs[-1]), 40, 14
    bottom = top + unit * CAPACITY
    drawing = Drawing(bottom + 60, "Tickets in use over the time of a run")
    count, points = 0, [(float(LEFT), float(bottom))]
    for at, change in sorted(changes):
        points.append((axis(at), bottom - unit * count))
        count += change
        points.append((axis(at), bottom - unit * count))
    drawing.line([(LEFT, top), (RIGHT, top)], COLORS[4], "6 4")
    drawing.text(RIGHT + 8, top + 4, "limit")
    drawing.line(points, GENERATED)
    drawing.line([(LEFT, bottom), (RIGHT, bottom)], "#888")
    for mark in range(0, CAPACITY + 1, GROUPS_PER_STEP):
        drawing.text(LEFT - 8, bottom - unit * mark + 4, str(mark), "end")
    drawing.text(LEFT, 22, f"limit: ({MAX_STALENESS} + 1) × {GROUPS_PER_STEP} groups")
    drawing.legend(bottom + 36, [(GENERATED, "groups with a ticket"), (COLORS[4], "limit")])
    drawing.save("admission")


def draw_versions(data: dict[str, Any]) -> None:
    """Draw the prompt whose completions have the most versions, beside one of a single version."""
    mixed = max(data["completions"], key=lambda group: sum(map(len, group)))
    plain = data["completions"][0]
    rows, cell = [*plain, *mixed], 10
    drawing = Drawing(60 + 24 * len(rows) + 40, "Policy version of every token")
    for row, versions in enumerate(rows):
        y, x = 30 + 24 * row + 12 * (row >= len(plain)), float(LEFT)
        drawing.text(LEFT - 8, y + 13, f"completion {row % len(plain) + 1}", "end")
        for version, tokens in versions:
            for _ in range(tokens):
                drawing.box(x, y, cell - 1, 18, COLORS[version % len(COLORS)])
                x += cell
        drawing.text(x + 8, y + 13, f"oldest: v{min(version for version, _ in versions)}")
    shown = sorted({version for versions in rows for version, _ in versions})
    names = [(COLORS[version % len(COLORS)], f"token sampled by v{version}") for version in shown]
    drawing.legend(60 + 24 * len(rows) + 20, names)
    drawing.save("versions")


def draw_weight_sync() -> None:
    """Draw what three policies do with two completions when version 6 follows version 5."""
    drawing = Drawing(330, "What running completions do when new weights arrive")
    old, new, wait, arrival = COLORS[5], COLORS[6], "#ddd", 380.0
    policies = {
        "drain": (((old, 360), (wait, 120), (new, 200)), ((old, 480), (new, 200))),
        "interrupt": (((old, 290), (wait, 50), (new, 340)), ((old, 290), (wait, 50), (new, 340))),
        "swap": (((old, 290), (new, 390)), ((old, 290), (new, 390))),
    }
    drawing.line([(arrival, 26), (arrival, 280)], SYNCED, "4 3")
    drawing.text(arrival, 20, "version 6 arrives", "middle")
    for number, (name, slots) in enumerate(policies.items()):
        y = 40 + 84 * number
        drawing.text(LEFT - 8, y + 30, name, "end")
        for row, parts in enumerate(slots):
            x = float(LEFT)
            for color, width in parts:
                drawing.box(x, y + 30 * row, width - 2, 22, color)
                x += width
    names = ((old, "tokens of version 5"), (new, "tokens of version 6"))
    drawing.legend(312, [*names, (wait, "no tokens: slot is empty, or prefill again")])
    drawing.save("weight_sync")


def draw_placement() -> None:
    """Draw what `paceline plan` gives to each role on a machine with eight GPUs."""
    cases = (
        ("hybrid", "hybrid sync", ["train.backend=fsdp"]),
        ("split", "split", ["train.backend=fsdp"]),
        ("one_step_off", "one step off", ["train.backend=fsdp"]),
        ("fully_async", "fully async", ["train.backend=fsdp"]),
    )
    drawing = Drawing(40 + 70 * len(cases), "Roles on eight GPUs, by mode")
    width = (WIDTH - LEFT - 40) / 8
    for gpu in range(8):
        drawing.text(LEFT + 20 + width * (gpu + 0.5), 22, f"GPU {gpu}", "middle")
    for row, (recipe, title, settings) in enumerate(cases):
        y = 36 + 70 * row
        drawing.text(LEFT + 10, y + 30, title, "end")
        plans = plan_workers(load_config(recipe, settings), parse_nodes("8:80GB"))
        for plan in plans:
            color = ("#a9c6e3", "#fbcf9d")[plan.pool != plans[0].pool]
            first = min(device.index for device in plan.devices)
            span = len(plan.devices)
            drawing.box(LEFT + 20 + width * first, y, width * span - 4, 48, color)
            middle = LEFT + 20 + width * (first + span / 2) - 2
            roles = " + ".join(role.name.lower() for role in plan.roles)
            drawing.text(middle, y + 29, roles, "middle")
    drawing.save("placement")


def main() -> None:
    if "--record" in sys.argv[1:]:
        DATA.write_text(json.dumps(record()) + "\n")
    data = json.loads(DATA.read_text())
    draw_staleness(data)
    draw_admission(data)
    draw_versions(data)
    draw_weight_sync()
    draw_placement()


if __name__ == "__main__":
    main()
