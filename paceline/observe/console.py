"""The console that everything is printed with. It shows text of models and data as text, prints to
outputs without Unicode, and may outlive its output."""

import errno
import logging
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from paceline.errors import PacelineError
from paceline.printable import printable

log = logging.getLogger(__name__)

# For outputs without Unicode: our own symbols in ASCII, most of them of the same width.
_PLAIN = str.maketrans(
    dict(zip("…→·×—–≤━▁▂▃▄▅▆▇█", [*".>.x--", "<=", *"=__..--##"], strict=True))
    | {chr(code): "*" for code in range(0x2800, 0x2900)}  # spinners
)


class RunConsole(Console):
    """A console whose text has no markup, no codes of emoji and no control characters.

    A string is printed as it is: styles are given as `Text`. If the output can no longer be
    written, as in `paceline train ... | head` or on a full disk, a console that `continues` stops
    printing; otherwise the command ends.
    """

    def __init__(self, continues: bool = True, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        self.continues = continues
        self._problem: OSError | None = None

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(self._safe(segment.text), segment.style)

    def _safe(self, text: str) -> str:
        text = printable(text)
        if self.encoding.startswith("utf"):
            return text
        coded = text.translate(_PLAIN).encode(self.encoding, "backslashreplace")
        return coded.decode(self.encoding)

    def __exit__(self, *exc: Any) -> None:  # everything is written at the end of a block
        try:
            super().__exit__(*exc)
        except OSError as error:
            self._lose_output(error)

    def on_broken_pipe(self) -> None:
        self._lose_output(BrokenPipeError(errno.EPIPE, "its reader has exited"))

    def require_output(self) -> None:
        """End the command now or later, if its output cannot be written."""
        self.continues = False
        if self._problem:
            self._end(self._problem)

    def _lose_output(self, problem: OSError) -> None:
        self.quiet, self._problem = True, problem
        discard_output(self.file)
        if not self.continues:
            self._end(problem)
        log.warning(
            "the output cannot be written any more (%s); the run continues without it",
            problem.strerror,
        )

    def _end(self, problem: OSError) -> None:
        if problem.errno == errno.EPIPE:
            raise SystemExit(128 + signal.SIGPIPE)  # what a shell reports for `yes | head`
        raise PacelineError(f"the output cannot be written: {problem.strerror}")


def discard_output(file: IO[str] | None = None) -> None:
    """Write to nowhere from here on, so that what is left in buffers cannot fail at the exit."""
    with suppress(OSError, ValueError):  # not a file of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())
