"""The benchmark's results in words: performance_report.md and summary.txt. Pure functions of results.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.cases import REFERENCE, SWEEPS, SYNC
from benchmarks.suite.criteria import MB, SLOWER, TOO_SHORT, Verdict, best, fastest

NOTES = {
    "mode": (
        f"`{REFERENCE}` is fully async with weights swapped in between two decode steps. Split placement trains a critic as well, "
        "so its figures are of more work."
    ),
    "staleness": "How many steps generation may run ahead. 0 waits for every step, in pools of its own; the bound is never exceeded.",
    "queue": (
        f"With `{REFERENCE}` the size is unset: room for all that may be under way. A smaller queue holds generation back, so that nothing "
        "is ever dropped; a larger one is never filled."
    ),
    "interval": (
        "Paceline has no clock between two generations: a new group starts when a ticket is free, and tickets come back when "
        "new weights are live. So the interval at which generation gets new work is the number of train steps per hand-over."
    ),
    "split": "Which devices generate and which train; without GPUs a device is a core's worth of processes, and one GPU is shared by all.",
    "pause": "The job was asked to pause and go on while it ran, as `paceline pause` and `paceline resume` do; figures include it.",
    "backend": "The same loop, another trainer, engine or way to start workers.",
    "guide": "Short answers of the built-in model and few steps: what the guide's own settings do, not a measurement of speed.",
}

COLUMNS = {
    "samples/s": "{samples_per_s:.1f}",
    "steps/s": "{steps_per_s:.2f}",
    "sample age, s": "{sample_age_s:.2f}",
    "staleness mean / max": "{staleness_mean:.2f} / {staleness_max:.0f}",
    "hand-over, ms": "{sync_ms:.1f}",
    "device use: rollout / train": "{rollout_busy:.0%} / {train_busy:.0%}",
    "queue use": "{queue_use:.0%}",
    "dropped": "{dropped:.0f}",
    "memory, MB": "{memory_mb:,.0f}",
}
GPU_COLUMNS = {
    "GPU use": "{gpu_use:.0%}",
    "GPU memory, MB": "{gpu_memory_mb:,.0f}",
}  # as the GPUs themselves say
TIMES = {
    "trainer: trains": "{trainer_trains:.0%}",
    "waits for samples": "{trainer_waits:.0%}",
    "hands over": "{trainer_hands_over:.0%}",
    "else": "{trainer_else:.0%}",
    "rollout: generates": "{rollout_generates:.0%}",
    "held for a hand-over": "{rollout_held:.0%}",
    "waits for tickets, rewards or its turn": "{rollout_idle:.0%}",
}


def report(results: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """`plots`: what each shows -> its file."""
    work, cases = results["work"], results["cases"]
    sections = [
        "# Performance report",
        f"`{results['command']}` · {results['choice']} · {results['machine']} · torch {results['versions']['torch']} · "
        f"{results['minutes']:.1f} minutes",
        f"Each case trains {work['steps']} steps of {work['batch']} prompts × 8 answers; the first {work['warm_up']} are not measured. "
        f"Lengths of answers are lognormal (median {work['median']}, p99 {8 * work['median']}, at most {work['cap']} tokens), "
        "the same in all cases; random weights unless a model was named, so that nothing is learned. "
        f"{work['rounds']} round{'s' if work['rounds'] > 1 else ''}, medians.",
        "## The best setting",
        verdict_of_best(results),
        "## Success criteria",
        _criteria(results),
        *(f"![{shows}]({file})" for shows, file in plots.items()),
    ]
    measured = [case for case in cases if case["state"] == "ok"]
    columns = (
        COLUMNS | GPU_COLUMNS
        if any(case["figures"]["gpu_memory_bytes"] for case in measured)
        else COLUMNS
    )
    for sweep, title in SWEEPS.items():
        rows = rows_of(sweep, cases)
        if rows:
            sections += [
                f"## {title}",
                NOTES[sweep],
                _table(rows, columns),
                *_pauses(rows),
                *_reasons(rows),
            ]
    sections += ["## Where the time of both sides went", _table(measured, TIMES)]
    return "\n\n".join(section for section in sections if section) + "\n"


def summary(results: Mapping[str, Any]) -> str:
    """A line per case, the criteria that do not hold, and the best setting."""
    lines = [
        f"{results['command']}: {results['choice']}; {results['machine']}; {results['minutes']:.1f} minutes",
        "",
    ]
    for case in results["cases"]:
        said = (
            line(case["figures"])
            if case["state"] == "ok"
            else f"{case['state']}: {case['reason'].splitlines()[0]}"
        )
        lines.append(f"{case['name']:24} {said}")
    lines += ["", *_shortfalls(results), "", f"best: {verdict_of_best(results)}"]
    return "\n".join(lines) + "\n"


def line(figures: Mapping[str, float]) -> str:
    return (
        f"{figures['samples_per_s']:.1f} samples/s, {figures['steps_per_s']:.2f} steps/s, age {figures['sample_age_s']:.2f} s, "
        f"staleness {figures['staleness_mean']:.1f}, queue {figures['queue_use']:.0%}, "
        f"busy {figures['rollout_busy']:.0%} rollout {figures['train_busy']:.0%} train"
    )


def verdict_of_best(results: Mapping[str, Any]) -> str:
    found = best(results["cases"])
    if found is None:
        return "No case ended well, so there is nothing to recommend."
    figures = found["figures"]
    own = dict(
        setting.split("=", 1) for setting in found["settings"]
    )  # a later one replaces an earlier
    settings = " ".join(f"{key}={value}" for key, value in own.items())
    said = [f"**{found['name']}** (`{settings}`): {figures['samples_per_s']:.1f} samples/s."]
    base = fastest(results["cases"], SYNC)
    if base and not found["name"].startswith(SYNC):
        ratio = figures["samples_per_s"] / base["figures"]["samples_per_s"]
        said.append(
            f"That is {ratio:.2f}× {base['name']}: its trainer trains {figures['trainer_trains']:.0%} of the time instead of "
            f"{base['figures']['trainer_trains']:.0%}, and engines generate {figures['rollout_busy']:.0%} instead of "
            f"{base['figures']['rollout_busy']:.0%}."
        )
    elif base:
        said.append("On this machine nothing that runs ahead is faster than taking turns.")
    said.append(
        f"Of the settings within {1 - SLOWER:.0%} of the fastest it has the freshest samples: staleness {figures['staleness_mean']:.2f} on "
        f"average, {figures['sample_age_s']:.2f} s old."
    )
    return " ".join(said)


def rows_of(sweep: str, cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cases of a sweep, after the one they are compared with."""
    own = [case for case in cases if case["sweep"] == sweep]
    other = [
        case for case in cases if case["name"] == REFERENCE and sweep not in ("staleness", "guide")
    ]
    return [*other, *own] if own else []


def _table(cases: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    lines = [f"| case | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for case in cases:
        if case["state"] == "ok":
            figures = case["figures"] | {"memory_mb": case["figures"]["memory_peak_bytes"] / MB}
            figures |= {"gpu_memory_mb": figures["gpu_memory_bytes"] / MB}
            lines.append(
                f"| {case['name']} | {' | '.join(text.format(**figures) for text in columns.values())} |"
            )
    return "\n".join(lines)


def _pauses(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"- {case['name']}: pause answered {case['pause']['paused']} in {1000 * case['pause']['pause_s']:.0f} ms, "
        f"{case['pause']['tokens']} tokens in {case['pause']['watched_s']:.1f} s of pause; resume answered {case['pause']['resumed']}, "
        f"new tokens seen {case['pause']['resume_s']:.1f} s later (looked at once a second)."
        for case in cases
        if case["state"] == "ok" and case["pause"]
    ]


def _reasons(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"- {case['name']} {case['state']}: {case['reason']}"
        for case in cases
        if case["state"] != "ok"
    ]


def _criteria(results: Mapping[str, Any]) -> str:
    """How many cases met each, and what those that did not are advised."""
    names = list(
        dict.fromkeys(
            verdict["criterion"] for case in results["cases"] for verdict in case["verdicts"]
        )
    )
    lines = ["| criterion | holds in |", "|---|---|"]
    if results["rate"]:
        lines.append(
            f"| {results['rate']['criterion']} | {'yes' if results['rate']['ok'] else 'no'}: {results['rate']['seen']} |"
        )
    for name in names:
        # a case may be judged several times: in each round, in the host's memory and the GPU's
        judged = [
            [v for v in case["verdicts"] if v["criterion"] == name] for case in results["cases"]
        ]
        told = [
            all(v["ok"] for v in verdicts)
            for verdicts in judged
            if any(not v["seen"].startswith(TOO_SHORT) for v in verdicts)
        ]
        short = sum(map(bool, judged)) - len(told)
        lines.append(
            f"| {name} | {sum(told)} of {len(told)} cases{f'; {short} {TOO_SHORT}' if short else ''} |"
        )
    return "\n".join([*lines, "", *(f"- {shortfall}" for shortfall in _shortfalls(results))])


def _shortfalls(results: Mapping[str, Any]) -> list[str]:
    found = [
        f"{case['name']}: {Verdict(**v)}"
        for case in results["cases"]
        for v in case["verdicts"]
        if not v["ok"]
    ]
    if results["rate"] and not results["rate"]["ok"]:
        found.insert(0, str(Verdict(**results["rate"])))
    return found or ["every criterion holds in every case"]
