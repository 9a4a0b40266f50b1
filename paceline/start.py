"""How a run starts, of reinforcement learning or supervised: its workers are planned, its directory
is opened, its first files are written."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.observe.recorder import write_json
from paceline.page.report import try_report
from paceline.progress import stage
from paceline.run_dir import (
    Start,
    branch,
    branches,
    find_start,
    lock_run_dir,
    log_file,
    move_aside,
    recorded_config,
)
from paceline.types import Role
from paceline.workers.automatic import changed_choices, keep_recorded
from paceline.workers.hardware import report_choices
from paceline.workers.layout import Layout, plan_that_fits

log = logging.getLogger(__name__)


async def plan_start(
    config: RunConfig,
    model_path: str,
    fresh: bool,
    start_from: str | None,
    roles: Sequence[Role] | None = None,
) -> Layout:
    """Plan the workers; a run that is resumed keeps its automatic settings."""
    run_dir = Path(config.run_dir)
    if fresh:
        _check_stays(Path(model_path), run_dir)
    keeps = branches(run_dir, start_from) or not fresh
    recorded = recorded_config(run_dir, start_from) if keeps else {}
    layout = await plan_that_fits(keep_recorded(config, recorded), model_path, roles)
    for warning in (*layout.warnings, *changed_choices(layout.choices, recorded)):
        log.warning("%s", warning)
    return layout


def _check_stays(model: Path, run_dir: Path) -> None:
    """Raise ConfigError if a run that starts over would move the model away that it loads."""
    if model.exists() and run_dir.resolve() in (model.resolve(), *model.resolve().parents):
        raise ConfigError(
            f"model = {model} is in run_dir = {run_dir}, which is moved aside when a run starts "
            "over (--fresh, in Python fresh=True); use another run_dir"
        )


async def open_run_dir(
    stack: AsyncExitStack,
    config: RunConfig,
    identity: dict[str, Any],
    fresh: bool,
    start_from: str | None,
    *,
    supervised: bool = False,
) -> Start:
    """Lock the run directory until the stack is closed; return where the run starts."""
    run_dir = Path(config.run_dir)
    is_branch = branches(run_dir, start_from)
    if fresh and (aside := move_aside(run_dir)):
        log.warning("moved the earlier run in %s to %s", run_dir, aside)
    stack.enter_context(lock_run_dir(run_dir))
    if start_from is not None and is_branch:
        await branch(run_dir, start_from, identity, supervised=supervised)
    return find_start(config, identity, None if is_branch else start_from)


def begin_files(
    stack: AsyncExitStack, run_dir: Path, choices: Iterable[object], config: dict[str, Any]
) -> None:
    """Begin what a run writes: its log, its settings and, when it ends, its report."""
    stack.enter_context(log_file(run_dir / "logs"))
    stack.callback(try_report, run_dir)
    report_choices(choices)
    write_json(run_dir / "settings.json", config)
    stage("starting the workers, which load the model")
