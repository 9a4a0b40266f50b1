"""`paceline plan`: what runs on which device, and with --probe how fast every mode is."""

import asyncio
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.app import app, console, fail, log_to_console, warn
from paceline.cli.arguments import recipe_argument, settings_argument
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.simulator.probe import Probe
    from paceline.workers.cluster import Node

Devices = Annotated[
    str | None,
    typer.Option(
        help="Plan for a cluster that is not there: nodes x GPUs : memory of a GPU, for "
        "example 4x8:80GB, or 8:24GB",
        show_default=False,
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="Plan for a model of this size instead of the recipe's: 0.5b, 1.5b, 3b, 7b, 14b, "
        "32b or 70b",
        show_default=False,
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--probe",
        help="Measure engine and trainer for some 20 s, predict the speed of every mode, and "
        "propose one with its settings.",
    ),
]
Costs = Annotated[
    Path,
    typer.Option(help="File for the costs that --probe measures; prediction.json is beside it."),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        help="Lengths of completions that --probe predicts for, as in `paceline simulate`.",
        show_default=False,
    ),
]


@app.command()
def plan(
    recipe: Annotated[Path, recipe_argument("Recipe, for example recipes/split.toml")],
    settings: Annotated[list[str] | None, settings_argument()] = None,
    devices: Devices = None,
    shape: Shape = None,
    probe: Measure = False,
    costs: Costs = Path("costs.json"),
    lengths: Lengths = None,
) -> None:
    """Show which devices each role gets and the memory of each phase. Starts no workers, unless
    they are probed."""
    from paceline.config import check_trainable, load_config
    from paceline.early_checks import check_early

    try:
        _check_options(shape, probe, lengths)
        config = load_config(recipe, settings or ())
        check_trainable(config)
        # A plan needs neither prompts nor a reward, but what the settings name must exist.
        no_rows, no_reward = config.data.path is None, config.reward.function is None
        if not devices and not shape:
            check_early(config, has_rows=no_rows, has_reward=no_reward)
        log_to_console()
        with console.status("loading torch and transformers …"):
            from paceline.inputs import prepare_model
            from paceline.observe.plan import plan_tables
            from paceline.observe.terminal import ModelProgress
        if not devices and not shape:
            with ModelProgress(console) as preparing:
                prepare_model(config, preparing)
        tables, warnings = asyncio.run(plan_tables(config, devices, shape))
    except PacelineError as error:
        fail(error)
    for table in tables:
        console.print(table)
    for warning in warnings:
        warn(warning)
    if probe:
        _probe_and_propose(recipe, settings or [], costs, devices, lengths)


def _check_options(shape: str | None, probe: bool, lengths: str | None) -> None:
    if probe and shape:
        raise ConfigError(
            f"--probe contradicts --shape {shape}: only the recipe's model can be measured; "
            "leave out one of them"
        )
    if lengths and not probe:
        raise ConfigError(
            f"--lengths {lengths} needs --probe, which predicts the speed; add --probe, or "
            "leave out --lengths"
        )


def _probe_and_propose(
    recipe: Path,
    settings: list[str],
    costs_path: Path,
    cluster: str | None,
    lengths: str | None,
) -> None:
    """Measure the recipe's engine and trainer, save the costs, and propose a mode and its settings.

    `cluster`: devices to predict for, as in `paceline plan --devices`; default: those here.
    """
    from paceline.cli.simulate import modes_table
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
