"""A table of completions with their rewards."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from paceline.observe.console import RunConsole
from paceline.types import Group, Trajectory


def print_completions(
    title: str, completions: Iterable[tuple[Group, Trajectory]], functions: Sequence[str]
) -> None:
    """Print completions with the reward of each function and the total."""
    table = Table(title=title, show_lines=True, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("completion", ratio=3)
    for name in (*functions, "reward"):
        table.add_column(name, justify="right")
    for group, trajectory in completions:
        scores = [*map(trajectory.details.get, functions), trajectory.total_reward]
        texts = ["" if score is None else f"{score:.2f}" for score in scores]
        table.add_row(group.prompt.text, trajectory.text, *texts)
    RunConsole().print(table)
