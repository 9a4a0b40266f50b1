"""Garbage collection, paused where it finds next to nothing and takes long."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause it for large imports, of which it takes a fifth of the time, or work without cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# Container objects that are created before a collection; Python's default is 700. A run creates
# tens of thousands per step, which are freed without it. Visiting those in flight every time took
# two fifths of the controller's time.
OBJECTS = 50_000


def collect_rarely() -> None:
    first, *others = gc.get_threshold()
    if first:  # else the program collects itself
        gc.set_threshold(max(first, OBJECTS), *others)


@contextmanager
def rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*before)
