"""A supervised run that a program or the command line asks for.

Waits for: the run, which has a separate thread with an event loop (background.py).
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.background import Background
from paceline.data.examples import check_example_columns
from paceline.data.files import find_files, first_rows
from paceline.early_checks import check_code, check_early, first_given_rows
from paceline.errors import ConfigError
from paceline.job import Rows, Run, Stopping, check_start, starting, with_absolute_run_dir
from paceline.supervised.config import SftConfig

if TYPE_CHECKING:
    from paceline.supervised.display import SftTerminal
    from paceline.supervised.recorder import LossObserver


@dataclass(frozen=True)
class SftJob:
    """A configuration, and the rows that a program gives as objects instead of settings."""

    config: SftConfig
    rows: Rows | None = None
    validation: Rows | None = None

    def start(
        self,
        fresh: bool = False,
        display: "bool | SftTerminal" = True,
        start_from: str | None = None,
    ) -> Background[Run]:
        config = with_absolute_run_dir(self.config)
        check_start(fresh, start_from)
        stopping = Stopping(asyncio.Event(), config.grace_s)
        workers = config.worker_config()
        check_early(workers, has_rows=True, has_reward=True)
        self._check_data()
        terminal = _terminal(self.config) if display is True else display or None
        with starting(workers, terminal) as closing:
            from paceline.supervised.run import fine_tune

        def make_display(first_step: int, steps: int) -> "LossObserver | None":
            stopping.has_begun = True
            return terminal.display(first_step, steps) if terminal else None

        def finish(run: Run) -> None:
            if terminal:
                terminal.finish(run.summary, str(run.checkpoint))

        work = partial(
            fine_tune,
            config,
            make_display,
            fresh=fresh,
            rows=self.rows,
            validation=self.validation,
            stop=stopping.event,
            start_from=start_from,
        )
        return stopping.in_background(config.run_dir, work, closing, finish)

    def _check_data(self) -> None:
        """Raise if files or columns are missing, before torch is imported."""
        data = self.config.data
        if self.rows is None:
            if data.task is None and data.path is None and data.source is None:
                raise ConfigError(
                    "there are no rows: set data.path (for example 'examples.jsonl'), data.source "
                    "or data.task (for example 'sort:5')"
                )
            if data.source is not None:
                check_code("data.source", str(data.source))
        files = data.model_copy(update={"task": None})  # a task has other columns
        if data.on_bad_row == "fail":  # otherwise the first rows may be bad
            for argument, given in (("data", self.rows), ("validation", self.validation)):
                limit = data.limit if argument == "data" else None
                first_ones = first_given_rows(given, limit)
                check_example_columns(first_ones, f"the rows given as {argument}", files)
        for path in (data.path, self.config.validation.path):
            if path is not None:
                first, *_ = find_files((path,) if isinstance(path, str) else path)
                if data.on_bad_row == "fail":
                    rows = [read.row for read in first_rows(first)]
                    check_example_columns(rows, str(first), files)


def _terminal(config: SftConfig) -> "SftTerminal":
    from paceline.supervised.display import SftTerminal

    return SftTerminal(config)
