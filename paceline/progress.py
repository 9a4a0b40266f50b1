"""The stages of a start, for a terminal that shows what it waits for. Nothing is logged.

`stage` costs nothing if no terminal listens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []


def stage(text: str) -> None:
    """Say what begins now, for example "reading prompts.jsonl"."""
    for listener in tuple(_listeners):
        listener(text)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Call the listener with every stage, in the thread where it begins."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
