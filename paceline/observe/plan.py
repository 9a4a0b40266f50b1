"""The tables of `paceline plan`: which devices each worker gets, and how much memory a device needs
in each phase."""

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import groupby

from rich.table import Table
from transformers import PretrainedConfig

from paceline.config import RunConfig
from paceline.data.tiny import resolve_model
from paceline.generation import open_agent, open_scorer, start_agent
from paceline.inputs import load_inputs
from paceline.model.known_shapes import known_shape
from paceline.model.loading import load_config
from paceline.workers.cluster import Device, Node, PlannedWorker, parse_nodes
from paceline.workers.fit import GB, phases_of
from paceline.workers.layout import Layout, plan_on, plan_that_fits
from paceline.workers.nearest import nearest_layout
from paceline.workers.phase_memory import MemoryNeed, Phase, total
from paceline.workers.pools import find_nodes


async def plan_tables(
    config: RunConfig, devices: str | None = None, shape: str | None = None
) -> tuple[list[Table], list[str]]:
    """Return the tables, and warnings about memory that may be scarce.

    `devices`: a cluster that is not there, for example 4x8:80GB. `shape`: the size of a known model
    instead of the recipe's. Without both, raise the PacelineError with which a run would not start;
    otherwise raise ConfigError if it cannot fit.
    """
    if devices or shape:
        nodes = parse_nodes(devices) if devices else await find_nodes(config)
        layout = plan_on(config, _model(config, shape), nodes)
    else:
        layout = await _checked(config)
    return _tables(layout, real=devices is None), _warnings(layout)


async def _checked(config: RunConfig) -> Layout:
    """Plan as a run does, with all of its checks."""
    inputs = load_inputs(config)
    agent = open_agent(config, inputs)
    layout = await plan_that_fits(config, inputs.model_path)
    async with AsyncExitStack() as stack:
        await start_agent(stack, layout.config, agent)
        await open_scorer(stack, layout.config, inputs, agent=agent)
    return layout


def _warnings(layout: Layout) -> list[str]:
    config, nodes, warnings = layout.config, layout.nodes, layout.warnings
    if layout.scarce and (settings := nearest_layout(config, layout.models, nodes)):
        warnings.append(f"the nearest layout that fits with full micro-batches: {settings}")
    if len(nodes) > 1 and config.cluster == "local":
        warnings.append("several nodes need cluster=ray")
    return warnings


def _tables(layout: Layout, real: bool) -> list[Table]:
    choices = [_choices_table(layout)] if layout.choices else []
    return [_layout_table(layout, real), _memory_table(layout), *choices]


def size(number: int) -> str:
    return f"{number / GB:.1f} GB" if number >= GB / 10 else f"{number / 2**20:.0f} MB"


def _model(config: RunConfig, shape: str | None) -> PretrainedConfig:
    if shape is not None:
        return known_shape(shape)
    if config.model.partition(":")[0] == "tiny":
        return load_config(resolve_model(config.model, config.data.task))
    return load_config(config.model)  # planning needs no weights and converts no GGUF file


def _layout_table(layout: Layout, real: bool) -> Table:
    table = Table("devices", "worker", "roles", title=_title(layout))
    if real:
        table.add_column("threads")
    position = {node.name: number for number, node in enumerate(layout.nodes)}
    rows = [
        (position[node], min(ranks)[1].index, node, ranks, plan)
        for plan in layout.plans
        for node, ranks in _by_node(plan)
    ]
    gpus = any(node.gpus for node in layout.nodes)
    for _, _, node, ranks, plan in sorted(rows, key=lambda row: row[:2]):
        place = f"{node[:8]} {'GPU' if gpus else 'CPU slot'} {_span([d.index for _, d in ranks])}"
        name = f"{plan.name} rank {_span([rank for rank, _ in ranks])}" if plan.ranks else plan.name
        threads = (str(plan.threads),) if real else ()
        table.add_row(place, name, ", ".join(plan.roles), *threads)
    return table


def _choices_table(layout: Layout) -> Table:
    table = Table("setting", "chosen", "why", title="automatic settings")
    for choice in layout.choices:
        table.add_row(choice.name, choice.text, choice.why)
    return table


def _memory_table(layout: Layout) -> Table:
    """Return the memory of a device of each kind of worker in each phase."""
    gpus = any(node.gpus for node in layout.nodes)
    has = min((node.gpu_memory for node in layout.nodes), default=0)
    title = "memory of a rank" + (f", of {size(has)}" if gpus and has else "")
    table = Table("worker", "for", *(phase.value for phase in Phase), title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    for plan in _kinds(layout.plans):
        phases = phases_of(plan, layout.nodes, layout.config, layout.models)
        names = dict.fromkeys(name for needs in phases.values() for name in needs)
        first = plan.name
        for name in names:
            cells = [_cell(phases.get(phase, {}).get(name)) for phase in Phase]
            table.add_row(first, name, *cells)
            first = ""
        sums = [total(phases[phase]) if phase in phases else None for phase in Phase]
        table.add_row("", "total", *map(_cell, sums), style="bold")
        table.add_section()
    return table


def _kinds(plans: Sequence[PlannedWorker]) -> Iterator[PlannedWorker]:
    """Yield one of the workers with the same roles and number of ranks."""
    seen = set()
    for plan in plans:
        if (plan.pool, plan.roles, plan.ranks) not in seen:
            seen.add((plan.pool, plan.roles, plan.ranks))
            yield plan


def _cell(need: MemoryNeed | None) -> str:
    if need is None:
        return ""
    return size(need.at_most) if need.fixed == need.at_most else f"≤ {size(need.at_most)}"


def _by_node(plan: PlannedWorker) -> Iterator[tuple[str, list[tuple[int, Device]]]]:
    ranks = sorted(enumerate(plan.devices), key=lambda item: item[1].node)
    for node, group in groupby(ranks, key=lambda item: item[1].node):
        yield node, list(group)


def _span(numbers: Sequence[int]) -> str:
    """Format numbers, for example 0-3 or 0, 2."""
    first, last = min(numbers), max(numbers)
    if len(numbers) > 1 and last - first == len(numbers) - 1:
        return f"{first}-{last}"
    return ", ".join(map(str, numbers))


def _title(layout: Layout) -> str:
    nodes: Sequence[Node] = layout.nodes
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    devices = f"{gpus} GPUs" if gpus else f"{cpus} CPU slots"
    where = layout.config.cluster
    return f"{where}: {len(nodes)} node{'s' if len(nodes) > 1 else ''}, {devices}"
