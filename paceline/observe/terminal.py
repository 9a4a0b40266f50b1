"""The console during a run: what is being loaded, then the display, then the summary."""

import logging
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.text import Text

from paceline.config import RunConfig
from paceline.model import gguf_cache
from paceline.observe.console import RunConsole
from paceline.observe.display import Display, print_summary
from paceline.printable import printable
from paceline.progress import listening
from paceline.workers import hardware

MIN_SHOWN_S = 2.0

DisplayT = TypeVar("DisplayT", bound=AbstractContextManager[Any])


class DeviceLines(logging.Handler):
    """Handler that shows which devices a run uses, and where the conversion of its GGUF file is."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        loggers = [logging.getLogger(part.__name__) for part in (hardware, gguf_cache)]
        self._levels = {logger: logger.level for logger in loggers}  # before

    def __enter__(self) -> None:
        for logger in self._levels:
            logger.setLevel(logging.INFO)
            logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        for logger, level in self._levels.items():
            logger.setLevel(level)
            logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:  # warnings are shown with all others
            self._console.print(record.getMessage(), highlight=False, soft_wrap=True)


class ModelProgress:
    """What is shown while the tiny model is created or a GGUF file is converted, both only once.

    A conversion has a panel with a bar, or a line per quarter where output is not a terminal.
    """

    def __init__(self, console: Console, status: Status | None = None) -> None:
        self._console, self._status = console, status
        self._model = ""  # that is being prepared
        self._bar = Progress(
            BarColumn(bar_width=max(4, min(40, console.width - 50))),
            DownloadColumn(),
            TimeElapsedColumn(),
            TextColumn("remaining"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("conversion", start=False)
        self._live: Live | None = None
        self._quarters = -1

    def __enter__(self) -> "ModelProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def __call__(self, model: str, done: int, total: int) -> None:
        if model != self._model:
            self._model, self._quarters = model, -1
            self._bar.reset(self._task)
        if model.startswith("tiny"):  # a built-in model
            if self._status:
                text = f"warming up the {model} model (only once): step {done} of {total} …"
                self._status.update(text)
        elif self._console.is_terminal:
            self._show(done, total)
        elif done * 4 // total > self._quarters:
            self._quarters = done * 4 // total
            self._console.print(
                f"converting {self._model} (only once): {done / 1e9:.1f} of {total / 1e9:.1f} GB",
                highlight=False,
                soft_wrap=True,
            )

    def _show(self, done: int, total: int) -> None:
        if self._live is None:
            if self._status:
                self._status.stop()  # a terminal has one moving part at a time
            self._bar.start_task(self._task)
            title = Text(printable(f"converting {Path(self._model).name} (only once)"))
            width = min(88, self._console.width)
            panel = Panel(self._bar, title=title, width=width, border_style="cyan")
            self._live = Live(panel, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._bar.update(self._task, completed=done, total=total)
        if done >= total:
            self.__exit__()
            if self._status:
                self._status.start()


class _Stage:
    """What is being done, with the seconds that it has taken once they are worth showing."""

    def __init__(self, text: str) -> None:
        self._text, self._begun = text, time.monotonic()

    def __rich__(self) -> Text:
        seconds = time.monotonic() - self._begun
        shown = f" {seconds:.0f} s" if seconds >= MIN_SHOWN_S else ""
        return Text(printable(f"{self._text} …{shown}"))


class StartTerminal:
    """What every run shows until its first step."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or RunConsole()
        self._status = self._console.status(_Stage("loading torch and transformers"))
        self._stages = ExitStack()
        self._devices = DeviceLines(self._console)
        self.preparing = ModelProgress(self._console, self._status)
        self._display: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Self:
        self._status.start()
        self._devices.__enter__()
        self._stages.enter_context(listening(lambda text: self._status.update(_Stage(text))))
        return self

    def __exit__(self, *_: object) -> None:
        self._devices.__exit__(None, None, None)
        self._stages.close()
        self.preparing.__exit__()
        self._status.stop()
        if self._display:
            self._display.__exit__(None, None, None)

    def starting(self) -> None:
        text = "loading the model and starting the workers"
        self._status.update(_Stage(text))
        if not self._console.is_terminal:
            self._console.print(f"{text} …")

    def _show(self, display: DisplayT) -> DisplayT:
        """Replace the status with the display of the steps."""
        self._stages.close()
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
