"""Garbage collection, paused where it finds next to nothing and takes long."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


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
OBJECTS = 20_000
_lock = Lock()
_open = 0  # contexts of all threads
_before: tuple[int, int, int] = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely while any thread is in such a context."""
    global _open, _before
    with _lock:
        if _open == 0:
            _before = gc.get_threshold()
            if _before[0]:  # else the program collects itself
                gc.set_threshold(max(_before[0], OBJECTS), *_before[1:])
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                gc.set_threshold(*_before)
