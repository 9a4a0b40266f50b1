"""`paceline simulate`: the speed of every mode, predicted."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.cli.app import Overrides, app, console, fail, log_to_console
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.simulator.modes import Comparison


@app.command()
def simulate(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Recipe, for example recipes/fully_async.toml, or the first key=value",
            show_default=False,
        ),
    ] = None,
    settings: Overrides = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with the costs of a device, for example from `paceline plan --probe`. "
            "Default: those of a 0.5B model on an H200.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths of completions: fixed:200, lognormal:MEDIAN,SIGMA, list:10,20,400, a "
            "file with a number per line, or a run directory. Default: lognormal with a quarter "
            "of rollout.max_response_length as the median.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Devices to use. Default: those of the recipe.", show_default=False
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Mean length of prompts. Default: half of data.max_prompt_length.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict the speed of every mode: the real loop in virtual time, without a model."""
    from paceline.config import load_config
    from paceline.simulator.costs import CostModel, read_costs
    from paceline.simulator.lengths import read_distribution
    from paceline.simulator.modes import compare_modes

    overrides = settings or []
    if recipe is not None and "=" in recipe:
        overrides, recipe = [recipe, *overrides], None
    log_to_console(as_json)
    try:
        config = load_config(recipe, overrides)
        model = read_costs(costs) if costs else CostModel()
        given = read_distribution(lengths) if lengths else None
        with console.status("simulating …") as status:
            found = compare_modes(
                config,
                model,
                given,
                devices,
                prompt_tokens=prompt_tokens,
                report=lambda mode: status.update(f"simulating {mode} …"),
            )
    except PacelineError as error:
        fail(error)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
        return
    console.print(modes_table(found))
    console.print(found.verdict(), highlight=False, soft_wrap=True)


def modes_table(found: "Comparison") -> Table:
    title = f"{found.devices} device{'s' if found.devices > 1 else ''}, lengths {found.lengths}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for column in (
        "mode",
        "pools",
        "steps/s",
        "tokens/s",
        "ratio",
        "stale",
        "busy",
        "engines\nidle",
        "trainer\nwaits",
    ):
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for result in found.results:
        outcome = result.outcome
        table.add_row(
            result.mode,
            result.devices,
            f"{outcome.steps_per_s:.3g}",
            f"{outcome.tokens_per_s:,.0f}",
            f"{found.ratio(result):.2f}x",
            f"{outcome.staleness_mean:.1f} ≤ {outcome.staleness_max}",
            f"{outcome.device_use:.0%}",
            f"{outcome.engines_idle:.0%}",
            # On a shared device, the trainer waits while the same device generates.
            "" if result.shared else f"{outcome.wait_s / outcome.step_s:.0%}",
            style="bold" if result is found.fastest else None,
        )
    return table
