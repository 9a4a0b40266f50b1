"""The console during a run: what is being loaded, then the display, then the summary."""

import logging
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

from rich.console import Console

from paceline.config import RunConfig
from paceline.observe.console import RunConsole
from paceline.observe.display import Display, print_summary
from paceline.workers import hardware

DisplayT = TypeVar("DisplayT", bound=AbstractContextManager[Any])


class DeviceLines(logging.Handler):
    """Handler that shows which devices a run uses, as workers/hardware.py logs them."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console, self._logger = console, logging.getLogger(hardware.__name__)

    def __enter__(self) -> None:
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:  # warnings are shown with all others
            self._console.print(record.getMessage(), markup=False, highlight=False, soft_wrap=True)


class StartTerminal:
    """What every run shows until its first step."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or RunConsole()
        self._status = self._console.status("loading torch and transformers …")
        self._devices = DeviceLines(self._console)
        self._display: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Self:
        self._status.start()
        self._devices.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._devices.__exit__(None, None, None)
        self._status.stop()
        if self._display:
            self._display.__exit__(None, None, None)

    def warming_up(self, step: int, total: int) -> None:
        self._status.update(f"warming up the tiny model (only once): step {step} of {total} …")

    def starting(self) -> None:
        text = "loading the model and starting the workers …"
        self._status.update(text)
        if not self._console.is_terminal:
            self._console.print(text)

    def _show(self, display: DisplayT) -> DisplayT:
        """Replace the status with the display of the steps."""
        self._status.stop()
        self._display = display
        display.__enter__()
        return display

    def _finish(self, run_dir: str, done: int, steps: int) -> None:
        """End the display, or report that there was nothing left to do."""
        self.__exit__()
        if self._display is None:
            self._console.print(
                f"{run_dir} is complete: {done} of {steps} steps. "
                "Raise steps to continue; to start over: --fresh, or fresh=True in Python",
                highlight=False,
                soft_wrap=True,
            )


class Terminal(StartTerminal):
    """What `paceline train` and `paceline.train` show."""

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        super().__init__(console)
        self._config = config

    def display(self, first_step: int) -> Display:
        config = self._config
        data = config.data.task or config.data.path or "rows of the program"
        title = f"{config.run_dir}: {config.algorithm.name}, {data}"
        staleness = config.schedule.max_staleness
        return self._show(Display(self._console, title, config.steps, first_step, staleness))

    def finish(self, summary: dict[str, Any]) -> None:
        self._finish(self._config.run_dir, summary["steps"], self._config.steps)
        print_summary(self._console, summary, self._config.run_dir)
