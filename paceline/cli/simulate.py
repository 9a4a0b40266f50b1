"""`paceline simulate` and `paceline plan --probe`: the speed of every mode, predicted."""

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.cli.app import Overrides, app, console, fail, log_to_console
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.simulator.modes import Comparison
    from paceline.simulator.probe import Probe
    from paceline.workers.cluster import Node


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
    log_to_console()
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


def probe_and_propose(
    recipe: Path,
    settings: list[str],
    costs_path: Path,
    cluster: str | None = None,
    lengths: str | None = None,
) -> None:
    """Measure the recipe's engine and trainer, save the costs, and propose a mode and its settings.

    `cluster`: devices to predict for, as in `paceline plan --devices`; default: those here.
    """
    from paceline.config import load_config
    from paceline.simulator.costs import write_costs
    from paceline.simulator.lengths import read_distribution
    from paceline.simulator.modes import compare_modes, recipe_devices
    from paceline.simulator.planner import STALENESS, propose
    from paceline.simulator.prediction import write_prediction
    from paceline.simulator.probe import probe, summary
    from paceline.workers.cluster import parse_nodes
    from paceline.workers.pools import find_nodes

    config, path = load_config(recipe, settings), costs_path.with_name("prediction.json")

    async def measure(report: Callable[[str], None]) -> "tuple[Probe, Sequence[Node]]":
        nodes = parse_nodes(cluster) if cluster else await find_nodes(config)
        return await probe(config, report), nodes

    try:
        given = read_distribution(lengths) if lengths else None
        with console.status("starting …") as status:
            found, nodes = asyncio.run(measure(lambda what: status.update(f"{what} …")))
            write_costs(costs_path, found.costs)
            gpus = sum(node.gpus for node in nodes)
            predicted = compare_modes(
                config if gpus else found.config,  # slots of a CPU do not depend on the mode
                found.costs,
                given,
                devices=gpus if cluster else max(gpus, recipe_devices(config)),
                prompt_tokens=found.prompt_tokens,
                report=lambda mode: status.update(f"simulating {mode} …"),
                staleness=STALENESS,
            )
            proposal = propose(
                predicted,
                lambda more: load_config(recipe, [*settings, *more]),
                found.model,
                nodes,
            )
            write_prediction(path, proposal.prediction())
    except PacelineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    for line in summary(found):
        console.print(line, highlight=False, soft_wrap=True)
    saved = f"saved in {costs_path}; prompts of {found.prompt_tokens} tokens"
    console.print(saved, highlight=False, soft_wrap=True)
    console.print(modes_table(predicted))
    for line in proposal.lines():
        console.print(line, highlight=False, soft_wrap=True)
    words = ["paceline", "train", str(recipe), *settings, *proposal.settings, f"prediction={path}"]
    console.print(shlex.join(words), highlight=False, soft_wrap=True)


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
