"""The console of a run, which outlives the program that reads its output."""

import logging
from contextlib import suppress

from rich.console import Console

log = logging.getLogger(__name__)


class RunConsole(Console):
    """A console that stops printing when its reader exits, as in `paceline train ... | head`."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()
        log.warning("the reader of the output has exited; the run continues without it")
