"""Result files say how they were measured, documents link them, and their figures are the same."""

import json
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.docs.documents import ROOT, documents, links_of

RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.json"))
Figures = Iterator[tuple[str, str]]  # page, text that it has


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_result_has_command_and_date(path: Path) -> None:
    found = json.loads(path.read_text())
    for part in [found] if "command" in found else found.values():
        script = re.match(r"python (benchmarks/\w+\.py)", part["command"])
        assert script and (ROOT / script[1]).exists(), part["command"]
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", part["date"])


def test_every_result_is_linked_from_document() -> None:
    linked = {(page.parent / path).resolve() for page in documents() for path, _ in links_of(page)}
    missing = [path.name for path in FILES if path.resolve() not in linked]
    assert not missing, f"link these files where their figures are: {missing}"


def test_every_script_is_listed() -> None:
    listed = (RESULTS.parent / "README.md").read_text()
    files = [*RESULTS.parent.glob("*.py"), *RESULTS.parent.glob("*.sh")]
    scripts = [f for f in files if f.suffix == ".sh" or "__main__" in f.read_text()]
    started = {"trl_script.py", "trl_worker.py", "vllm_worker.py"}  # by others
    missing = {f.name for f in scripts if f"`{f.name}`" not in listed} - started
    assert not missing, f"add to benchmarks/README.md: {sorted(missing)}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def fixed(value: float | Decimal, digits: int) -> str:
    """Return the decimal as people round it: 0.725 is 0.73."""
    return str(Decimal(str(value)).quantize(Decimal(10) ** -digits, ROUND_HALF_UP))


def readme() -> Figures:
    steps, page = result("vs_trl")["contenders"], "README.md"
    defaults = steps["Paceline, hybrid sync, bfloat16"]["times_faster_than_trl_defaults"]
    tuned = steps["Paceline, hybrid sync, float32"]["times_faster_than_trl_tuned"]
    yield page, f"{defaults:.1f}× / {tuned:.1f}× | `python benchmarks/vs_trl.py`"
    modes = result("modes")
    ratios = [f["modes"]["fully async"]["ratio"] for f in (modes, *modes["other_lengths"])]
    yield page, "{:.2f}×, {:.2f}× and {:.2f}×".format(*ratios)
    native = result("engine")["native_is_times_faster"]["long tail"]["transformers.generate"]
    yield page, f"{native:.1f}× | `python benchmarks/engine.py`"
    rates = " / ".join(f"{row['tokens_per_s'] / 1000:.0f}k" for row in result("gpu_engine")["0.5B"])
    yield page, f"{rates} tokens/s | `python benchmarks/gpu_engine.py`"
    train = result("gpu_train")
    packed, grouped = train["packed"], train["eight_completions_per_prompt"]
    yield page, f"{packed['tokens_per_s'] / 1000:.0f}k tokens/s"
    yield page, f"{percent(packed['fraction_of_matmul_rate'])} of the measured matmul rate"
    yield page, f"8 completions per prompt {percent(grouped['fraction_of_matmul_rate'])}"
    for load, digits in (("0.5b 512", 2), ("0.5b long tail", 1), ("smollm gsm8k", 2)):
        hybrid, ahead = (means_of_load(load)[mode] for mode in ("hybrid", "async"))
        yield page, f"{hybrid:.{digits}f} s / {ahead:.{digits}f} s | `python benchmarks/gpu_real.py"


def means_of_load(load: str) -> dict[str, float]:
    """Return the mean seconds of a step by mode, with automatic settings."""
    runs = result("gpu_real")["runs"]
    chosen = [run for run in runs if run["load"] == load and run["settings"] == "auto"]
    return {run["mode"]: run["mean_s"] for run in chosen}


def staleness() -> Figures:
    for case, f in result("learning")["cases"].items():
        reached = f["seconds_to_0.9"] < f["seconds"]
        yield (
            "docs/staleness.md",
            row(
                case.replace("staleness ", "staleness ≤ "),
                f"{f['final_mean']:.3f} ({f['final_sd']:.3f})",
                f"{f['reward_at_half_of_sync_time']:.3f}",
                f"{f['seconds_to_0.9']:.1f}" if reached else "not reached",
                f"{f['seconds']:.1f}",
            ),
        )


def stability() -> Figures:
    """Yield the rows without the names of the cases, which differ in the document."""
    for part, digits in (("recipes", 4), ("ablation", 3)):
        for runs in result("stability")[part]["runs"].values():
            kl = fmean(run["staleness_kl"] for run in runs)
            cells = (
                ", ".join(f"{run['end']:.2f}" for run in runs),
                ", ".join(f"{run['best'] - run['end']:.3f}" for run in runs),
                ", ".join(f"{run['fall']:.3f}" for run in runs),
                f"{kl:.{digits}f}" if kl else "–",
            )
            yield "docs/stability.md", row(*cells)
    (runs,) = result("stability")["long"]["runs"].values()
    falls = [f"{run['fall']:.3f}" for run in runs]
    yield "docs/stability.md", f"falls of {falls[0]}, {falls[1]} and {falls[2]}"


def device_time() -> Figures:
    for mode, f in result("instrumentation_cost")["modes"].items():
        costs = [
            [fixed(100 * Decimal(str(c[name])), 1) for name in ("cost", "low", "high")]
            for kind in ("cost", "cpu_cost")
            for c in (f[kind]["ledger"], f[kind]["trace"])
        ]
        yield (
            "docs/device_time.md",
            row(mode, *(f"{c} % ({low} to {high})" for c, low, high in costs)),
        )


def simulate() -> Figures:
    for f in result("prediction")["rows"]:
        lengths = f["load"].removeprefix("median ").replace(" p99", "")
        speeds = [f"{f[kind]['steps_per_s']:.3g}" for kind in ("predicted", "measured")]
        error = f"{f['error']:+.0%}".replace("%", " %")
        yield "docs/simulate.md", row(lengths, f["mode"].split(",")[0], *speeds, error)
    for f in result("published")["rows"]:
        predicted, given = f["predicted"], f["rollout_eighths"]
        best = max(predicted, key=lambda eighths: predicted[eighths])
        splits = (str(given or ""), best)
        cells = [f"{predicted[n]:.2f}x ({n}:{8 - int(n)})" if n else "" for n in splits]
        yield "docs/simulate.md", " | ".join(cells)


def backends() -> Figures:
    page, loaded = "docs/backends.md", result("loading")["rows"]
    for label, name, unit in (
        ("open: added peak memory of a rank", "open_peak_mb", " MB"),
        ("open: seconds", "open_s", ""),
        ("checkpoint of 2,951 MB: added peak memory of a rank", "save_peak_mb", " MB"),
        ("checkpoint: seconds, with checksums", "checkpoint_s", ""),
        ("resume: added peak memory of a rank", "load_peak_mb", " MB"),
        ("resume: seconds, without checksums", "load_s", ""),
    ):
        highest = [max(rank[name] for rank in loaded[version]) for version in ("before", "now")]
        yield page, row(label, *(f"{v:,.0f}{unit}" if unit else f"{v:.1f}" for v in highest))
    saved = result("checkpoint_cost")
    yield page, f"adds {percent(saved['cost'])} to the step time"
    yield page, f"({saved['step_s']:.1f} s without it"
    ranks = result("hybrid_ranks")
    yield page, f"{ranks['25M']['ratio']:.1f} times the tokens per second"
    yield page, f"{ranks['0.8M']['ratio']:.1f} times with one of 0.8M"
    for name, f in result("gpu_backends")["many_micro_batches"].items():
        if name != "rows":
            few = result("gpu_backends")["one_micro_batch"][name]
            rates = (round(f["tokens_per_s"], -2), round(few["tokens_per_s"], -2))
            yield page, f"| {rates[0]:,}"
            yield page, f"| {rates[1]:,}"


def engines() -> Figures:
    page, found = "docs/engines.md", result("gpu_vllm")
    yield page, row("weight sync by CUDA IPC", f"{found['sync']['sync_s']:.2f} s")
    yield page, f"{found['sleep']['sleep_and_wake_s']:.2f} s (first sleep"
    yield page, f"{found['sync']['tokens_per_s_256_eager'] / 1000:.1f}k tokens/s"
    rows = [f for f in result("sync")["rows"] if (f["megabytes"], f["engines"]) == (1000, 4)]
    memory, stream, broadcast = (f"{f['live_s']:.1f} s" for f in rows)
    yield page, f"{memory} by shared memory, {stream} by TCP streams and {broadcast} by gloo"
    raw = [f"{f['raw_s']:.1f}" for f in rows]
    yield page, f"takes {raw[0]}, {raw[1]} and {raw[2]} s"


def gpu() -> Figures:
    page, train = "benchmarks/results/gpu.md", result("gpu_train")
    for name in ("packed", "small_micro_batches", "eight_completions_per_prompt", "checkpointing"):
        f = train[name]
        rates = [f"{round(f[key], -2):,}" for key in ("tokens_per_s", "limit_tokens_per_s")]
        yield page, f"| {row(*rates, percent(f['fraction_of_matmul_rate'])).strip('| ')} |"
        yield page, f"| {f['peak_GiB']} GiB |"
    engine = result("gpu_engine")
    for f in (*engine["0.5B"], *engine["1.5B"]):
        yield page, f"| {round(f['tokens_per_s'], -2):,} | {f['target']:,.0f} |"
    times = [fixed(engine["step_ms"][n], 2) for n in ("1", "2", "4", "8", "16", "32")]
    yield page, row("current version", *times)
    for load, digits in (("SmolLM2, GSM8K", 2), ("SmolLM2, sums", 3)):
        means = means_of_load({"SmolLM2, GSM8K": "smollm gsm8k"}.get(load, "smollm arithmetic"))
        yield page, f"| {load} | {means['hybrid']:.{digits}f} s ("
        yield page, f"| {means['async']:.{digits}f} s ("
        yield page, f"| {means['hybrid'] / means['async']:.2f} × |"


def reliability() -> Figures:
    page = "docs/reliability.md"
    found = [result(f"soak_{where}") for where in ("local", "ray")]

    def pair(part: str, name: str) -> list[float]:
        checks = [{c["name"]: c["value"] for c in f[part]["checks"]} for f in found]
        return [each[name] for each in checks]

    often, seldom = "a fault every 25 s", "a fault every 60 s"
    ends = zip(pair(often, "reward at the end"), pair(often, "reward without faults"), strict=True)
    yield page, " | ".join(f"{fixed(end, 3)} / {fixed(calm, 3)}" for end, calm in ends)
    yield page, row("at least 25", *(f"{n}" for n in pair(often, "faults that fired")))
    yield page, row("", *map(percent, pair(often, "useful time"))).replace("|  |", "| |")
    times, faults = pair(seldom, "useful time"), pair(seldom, "faults that fired")
    for useful, fired in zip(times, faults, strict=True):
        yield page, f"{percent(useful)} (12 minutes, {fired} faults)"
    flat = {c["name"]: c["value"] for c in result("flat_memory")["checks"]}
    yield page, f"producers were {flat['producers faster than trainer, times']:.0f} times faster"
    yield page, f"grew by {flat['MB per minute: all processes']:.1f} MB per minute"
    cycles = {c["name"]: c["value"] for c in result("cycles")["checks"]}
    in_use, resident = (
        cycles[f"growth of {name}, MB per 100 cycles"] * cycles["cycles"] / 100
        for name in ("bytes in use", "resident memory")
    )
    yield page, f"{in_use:.2f} MB in use. Resident memory grew by {resident:.0f} MB"


def others() -> Figures:
    yield "docs/customization.md", f"makes {result('environment_latency')['ratio']} times the steps"
    script = result("trl_script")
    theirs, ours = (f["script_s"] for f in script["contenders"].values())
    ratios = script["ratios"]
    yield "docs/trl.md", f"{theirs:.0f} s under TRL 1.16 and {ours:.0f} s under Paceline"
    yield "docs/trl.md", f"{ratios['script_s']:.1f} times as fast, imports included"
    yield "docs/trl.md", f"an update {ratios['step_s']:.1f} times"
    runs = [
        {step: right for _, step, right in run["accuracy"]} for run in result("teach_sums")["runs"]
    ]
    first, last = ({fixed(100 * run[step], 0) for run in runs} for step in (0, 20))
    gym = result("teach_reasoning_gym")["runs"]
    for run in gym:
        seconds, _, end = run["accuracy"][-1]
        yield "benchmarks/results/gpu.md", f"| {fixed(100 * end, 1)} % ({seconds:.0f} s) |"
    ends = sorted(fixed(100 * run["accuracy"][-1][2], 0) for run in gym)
    yield (
        "README.md",
        f"{fixed(100 * gym[0]['accuracy'][0][2], 0)} % / {ends[0]}–{ends[-1]} % (five",
    )
    yield "README.md", f"{'–'.join(sorted(first))} % / {min(last)}–{max(last)} % (three seeds"


@pytest.mark.parametrize(
    "figures",
    [
        readme,
        staleness,
        stability,
        device_time,
        simulate,
        backends,
        engines,
        gpu,
        reliability,
        others,
    ],
)
def test_figures_are_those_of_result(figures: Any) -> None:
    pages = {page: " ".join((ROOT / page).read_text().split()) for page, _ in figures()}
    wrong = [f"{page}: no {text!r}" for page, text in figures() if text not in pages[page]]
    assert not wrong, "\n".join(wrong)
