"""Failures of user code that runs in the event loop of a run."""

import asyncio
from pathlib import Path

from paceline.errors import frames_of

_OURS = str(Path(__file__).parents[1])


def is_failure(error: BaseException) -> bool:
    """Return whether user code failed, and not the run that ends it.

    `sys.exit()` would end the whole process. A CancelledError that user code raises itself, for
    example by awaiting a task that it has cancelled, would look like the end of the run. A panic of
    a Rust library is no `Exception`.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


def line_of(error: BaseException) -> str:
    """Return file and line of an error: the last line outside of Paceline, else the last line."""
    frames = frames_of(error)
    theirs = [frame for frame in frames if not frame.filename.startswith(("<", _OURS))]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
