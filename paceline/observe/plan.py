"""The table of `paceline plan`: which worker and role each device gets, and how much memory they
need."""

from contextlib import AsyncExitStack

from rich.table import Table

from paceline.config import RunConfig
from paceline.generation import open_scorer
from paceline.inputs import load_inputs
from paceline.rollout.environment import open_environment
from paceline.workers.cluster import Node
from paceline.workers.fit import GB, needs, plan_that_fits


async def plan_table(config: RunConfig) -> tuple[Table, list[str]]:
    """Return the table, and warnings about roles that may not fit into memory.

    Raise the PacelineError with which a run would not start.
    """
    inputs = load_inputs(config)
    open_environment(config.rollout.environment, inputs.tokenizer)
    model_path = inputs.model_path
    nodes, plans, warnings = await plan_that_fits(config, model_path)
    async with AsyncExitStack() as stack:
        await open_scorer(stack, config, inputs)
    table = Table(
        "device", "worker", "role", "threads", "memory", "at most", title=_title(config, nodes)
    )
    by_name = {node.name: node for node in nodes}
    position = {node.name: number for number, node in enumerate(nodes)}
    rows = [(device, rank, plan) for plan in plans for rank, device in enumerate(plan.devices)]
    rows.sort(key=lambda row: (position[row[0].node], row[0].index))
    for device, rank, plan in rows:
        need = needs(plan, config, model_path)
        place = (
            f"{device.node[:8]} {'GPU' if by_name[device.node].gpus else 'CPU slot'} {device.index}"
        )
        name = f"{plan.name} rank {rank}" if plan.ranks else plan.name
        for number, role in enumerate(plan.roles):
            cells = (place, name) if number == 0 else ("", "")
            table.add_row(
                *cells,
                role.value,
                str(plan.threads),
                size(need[role].fixed),
                size(need[role].at_most),
            )
    return table, warnings


def size(number: int) -> str:
    return f"{number / GB:.1f} GB" if number >= GB / 10 else f"{number / 2**20:.0f} MB"


def _title(config: RunConfig, nodes: list[Node]) -> str:
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    devices = f"{gpus} GPUs" if gpus else f"{cpus} CPU slots"
    return f"{config.cluster}: {len(nodes)} node{'s' if len(nodes) > 1 else ''}, {devices}"
