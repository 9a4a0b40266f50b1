"""Text of performance_report.md and summary.txt. Pure functions of the contents of results.json."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.cases import REFERENCE, SWEEPS, SYNC
from benchmarks.suite.criteria import MB, NOISE, TOO_SHORT, CheckResult, best, fastest

NOTES = {
    "mode": (
        f"`{REFERENCE}` is fully async; engines swap weights between two decode steps. "
        "Split placement also trains a critic, so it does more work than the other cases."
    ),
    "staleness": (
        "Number of steps that generation may run ahead. With 0, generation in its separate pool "
        "waits for every step. No sample exceeds the bound."
    ),
    "queue": (
        f"`{REFERENCE}` uses the default size, which has room for all groups in flight. A smaller "
        "queue delays generation, so nothing is dropped; a larger one never fills."
    ),
    "interval": (
        "A new group starts when a ticket is free, and tickets return when new weights are live. "
        "The interval between new groups is therefore the number of train steps per weight sync."
    ),
    "split": (
        "Number of devices that generate and that train. Without GPUs, a device is a process "
        "on the CPU; a single GPU is shared by all roles."
    ),
    "pause": (
        "The run was paused and resumed, as with `paceline pause` and `paceline resume`. "
        "The metrics include the pause."
    ),
    "backend": "The same loop with another trainer, engine or cluster.",
    "recipe": (
        "Short completions of the built-in model and few steps: this shows that the recipes run "
        "and is not a measurement of speed."
    ),
}

COLUMNS = {
    "samples/s": "{samples_per_s:.1f}",
    "steps/s": "{steps_per_s:.2f}",
    "sample age, s": "{sample_age_s:.2f}",
    "staleness mean / max": "{staleness_mean:.2f} / {staleness_max:.0f}",
    "weight sync, ms": "{sync_ms:.1f}",
    "busy: rollout / train": "{rollout_busy:.0%} / {train_busy:.0%}",
    "queue utilization": "{queue_utilization:.0%}",
    "dropped": "{dropped:.0f}",
    "memory, MB": "{memory_mb:,.0f}",
}
# as reported by nvidia-smi
GPU_COLUMNS = {"GPU utilization": "{gpu_utilization:.0%}", "GPU memory, MB": "{gpu_memory_mb:,.0f}"}
TIMES = {
    "trainer: trains": "{trainer_trains:.0%}",
    "waits for samples": "{trainer_waits:.0%}",
    "syncs weights": "{trainer_syncs:.0%}",
    "other": "{trainer_other:.0%}",
    "rollout: generates": "{rollout_generates:.0%}",
    "paused for weight sync": "{rollout_paused:.0%}",
    "waits for tickets, rewards or the trainer": "{rollout_idle:.0%}",
}


def report(results: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Return performance_report.md; `plots` maps the title of each plot to its file."""
    work, cases = results["work"], results["cases"]
    sections = [
        "# Performance report",
        f"`{results['command']}` · {results['date']} · {results['choice']} · {results['machine']} "
        f"· torch {results['versions']['torch']} · {results['minutes']:.1f} minutes",
        f"Each case trains {work['steps']} steps of {work['batch']} prompts × 8 completions; the "
        f"first {work['warm_up']} steps are not measured. Completion lengths are lognormal (median "
        f"{work['median']}, p99 {8 * work['median']}, at most {work['cap']} tokens) and the same "
        "in all cases. The weights are random unless a model is given, so nothing is learned. "
        f"Medians of {work['rounds']} round{'s' if work['rounds'] > 1 else ''}.",
        "## Best setting",
        describe_best(results),
        "## Success criteria",
        _criteria(results),
        *(f"![{title}]({file})" for title, file in plots.items()),
    ]
    measured = [case for case in cases if case["state"] == "ok"]
    on_gpus = any(case["metrics"]["gpu_memory_bytes"] for case in measured)
    columns = COLUMNS | GPU_COLUMNS if on_gpus else COLUMNS
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
    sections += ["## Time of trainer and engines", _table(measured, TIMES)]
    return "\n\n".join(section for section in sections if section) + "\n"


def summary(results: Mapping[str, Any]) -> str:
    """Return summary.txt: a line per case, the counts, the failed checks and the best setting."""
    lines = [
        f"{results['command']}, {results['date']}: {results['choice']}; {results['machine']}; "
        f"{results['minutes']:.1f} minutes",
        "",
    ]
    lines += [f"{case['name']:24} {outcome_line(case)}" for case in results["cases"]]
    lines += ["", *_counts(results), *_failed_checks(results)]
    lines += ["", f"best: {describe_best(results)}"]
    return "\n".join(lines) + "\n"


def outcome_line(case: Mapping[str, Any]) -> str:
    """Return the metrics of a completed case, or the reason why there are none, on one line."""
    if case["state"] != "ok":
        return f"{case['state']}: {case['reason'].splitlines()[0]}"
    return (
        "{samples_per_s:.1f} samples/s, {steps_per_s:.2f} steps/s, age {sample_age_s:.2f} s, "
        "staleness {staleness_mean:.1f}, queue {queue_utilization:.0%}, "
        "busy: rollout {rollout_busy:.0%}, train {train_busy:.0%}"
    ).format(**case["metrics"])


def describe_best(results: Mapping[str, Any]) -> str:
    found = best(results["cases"])
    if found is None:
        return "No comparable case completed and passed, so there is no recommendation."
    metrics = found["metrics"]
    # a later setting replaces an earlier one of the same name
    settings = dict(setting.split("=", 1) for setting in found["settings"])
    shown = " ".join(f"{key}={value}" for key, value in settings.items())
    sentences = [f"**{found['name']}** (`{shown}`): {metrics['samples_per_s']:.1f} samples/s."]
    base = fastest(results["cases"], SYNC)
    if base and not found["name"].startswith(SYNC):
        ratio = metrics["samples_per_s"] / base["metrics"]["samples_per_s"]
        sentences.append(
            f"That is {ratio:.2f}× {base['name']}: its trainer trains "
            f"{metrics['trainer_trains']:.0%} of the time instead of "
            f"{base['metrics']['trainer_trains']:.0%}, and its engines generate "
            f"{metrics['rollout_busy']:.0%} instead of {base['metrics']['rollout_busy']:.0%}."
        )
    elif base:
        sentences.append("On this machine no asynchronous setting is faster than hybrid sync.")
    sentences.append(
        f"Of the settings within {1 - NOISE:.0%} of the fastest, it has the freshest samples: "
        f"staleness {metrics['staleness_mean']:.2f} on average, "
        f"{metrics['sample_age_s']:.2f} s old."
    )
    return " ".join(sentences)


def rows_of(sweep: str, cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the cases of a sweep, after the reference they are compared with."""
    rows = [case for case in cases if case["sweep"] == sweep]
    reference = [
        case for case in cases if case["name"] == REFERENCE and sweep not in ("staleness", "recipe")
    ]
    return [*reference, *rows] if rows else []


def _table(cases: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    lines = [f"| case | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for case in cases:
        if case["state"] == "ok":
            metrics = case["metrics"] | {
                "memory_mb": case["metrics"]["memory_peak_bytes"] / MB,
                "gpu_memory_mb": case["metrics"]["gpu_memory_bytes"] / MB,
            }
            cells = " | ".join(text.format(**metrics) for text in columns.values())
            lines.append(f"| {case['name']} | {cells} |")
    return "\n".join(lines)


def _pauses(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    text = (
        "- {name}: pause returned {paused} after {pause_ms:.0f} ms, {tokens} tokens in "
        "{watched_s:.1f} s of pause; resume returned {resumed}, new tokens {resume_s:.1f} s later "
        "(polled once a second)."
    )
    return [
        text.format(name=case["name"], pause_ms=1000 * case["pause"]["pause_s"], **case["pause"])
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
    """Return the number of cases that met each criterion, and the failed checks."""
    names = dict.fromkeys(
        check["criterion"] for case in results["cases"] for check in case["checks"]
    )
    lines = ["| criterion | holds in |", "|---|---|"]
    if rate := results["rate"]:
        held = "yes" if rate["ok"] else "no"
        lines.append(f"| {rate['criterion']} | {held}: {rate['observed']} |")
    for name in names:
        # a case can have several checks of one criterion: per round, for host and GPU memory
        by_case = [
            [check for check in case["checks"] if check["criterion"] == name]
            for case in results["cases"]
        ]
        measured = [
            all(check["ok"] for check in checks)
            for checks in by_case
            if any(map(_measured, checks))
        ]
        short = sum(map(bool, by_case)) - len(measured)
        note = f"; {short} {TOO_SHORT}" if short else ""
        lines.append(f"| {name} | {sum(measured)} of {len(measured)} cases{note} |")
    items = [*_counts(results), *_failed_checks(results)]
    return "\n".join([*lines, "", *(f"- {item}" for item in items)])


def _measured(check: Mapping[str, Any]) -> bool:
    return not check["observed"].startswith(TOO_SHORT)


def _all_checks(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rate = [results["rate"]] if results["rate"] else []
    return [*rate, *(check for case in results["cases"] for check in case["checks"])]


def _counts(results: Mapping[str, Any]) -> list[str]:
    """Return how many cases and checks were planned, done and passed."""
    states = Counter(case["state"] for case in results["cases"])
    checks = _all_checks(results)
    measured = [check for check in checks if _measured(check)]
    passed = sum(check["ok"] for check in measured)
    failed = sum(check["required"] and not check["ok"] for check in measured)
    lines = [
        f"cases: {len(results['cases'])} planned, {states['ok']} completed, "
        f"{states['failed']} failed, {states['skipped']} skipped",
        f"checks: {len(measured)} made, {passed} passed, {failed} failed, "
        f"{len(measured) - passed - failed} with advice only"
        + (f"; {len(checks) - len(measured)} not made: {TOO_SHORT}" if checks != measured else ""),
    ]
    if states["ok"] == len(results["cases"]) > 0 and passed == len(checks):
        lines.append("every planned case completed and every criterion holds")
    return lines


def _failed_checks(results: Mapping[str, Any]) -> list[str]:
    rate = results["rate"]
    failed = [str(CheckResult(**rate))] if rate and not rate["ok"] else []
    return failed + [
        f"{case['name']}: {CheckResult(**check)}"
        for case in results["cases"]
        for check in case["checks"]
        if not check["ok"]
    ]
