"""`paceline doctor`: what is right and wrong with this machine, and what to do."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli.app import app, console, fail
from paceline.cli.arguments import recipe_argument, settings_argument
from paceline.errors import PacelineError

COLORS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@app.command()
def doctor(
    recipe: Annotated[Path | None, recipe_argument("Also check what this recipe needs")] = None,
    settings: Annotated[list[str] | None, settings_argument()] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, devices and limits of this machine. Exit code 1: a problem was found."""
    from paceline.doctor import examine

    counts: Counter[str] = Counter()
    found = []
    try:
        for finding in examine(recipe, settings or ()):
            counts[finding.status] += 1
            found.append(asdict(finding))
            if not as_json:
                mark = Text(f"{finding.status:8}", COLORS[finding.status])
                console.print(
                    Text.assemble(mark, f" {finding.check:20} {finding.found}"), soft_wrap=True
                )
                if finding.advice:
                    console.print(Text(f"{'':30}→ {finding.advice}", "bold"), soft_wrap=True)
    except PacelineError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        numbers = (
            f"{counts[kind]} {kind}{'' if counts[kind] == 1 else 's'}"
            for kind in ("problem", "warning")
        )
        console.print(", ".join(numbers), highlight=False)
    raise typer.Exit(1 if counts["problem"] else 0)
