"""`paceline audit`: the check of a run directory, for people and programs."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paceline.auditor.report import CHECKS, AuditReport
from paceline.cli.app import app, console, fail
from paceline.errors import PacelineError

MOST_SHOWN = 10  # problems per check; --json has all


@app.command()
def audit(
    run: Annotated[
        Path, typer.Argument(help="Run directory, for example runs/fully_async", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the files of a run: prompts, order, staleness, metrics, checkpoints. Exit code 1: a
    problem was found."""
    from paceline.auditor.audit import audit as check

    try:
        report = check(run)
    except PacelineError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        _show(report)
    raise typer.Exit(0 if report.ok else 1)


def _show(report: AuditReport) -> None:
    for check, meaning in CHECKS.items():
        found = [str(problem) for problem in report.problems if problem.check == check]
        mark = ("FAIL", "bold red") if found else ("ok  ", "green")
        console.print(Text.assemble(mark, f"  {check:12} {meaning}"), soft_wrap=True)
        more = len(found) - MOST_SHOWN
        for line in found[:MOST_SHOWN] + ([f"and {more} more (--json)"] if more > 0 else []):
            console.print(Text(f"      {line}"), soft_wrap=True)
    for note in report.notes:
        console.print(Text(f"note  {note}"), soft_wrap=True)
    counts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in report.counts.items())
    console.print(Text(f"{report.run_dir}: {counts}"), soft_wrap=True)
