"""The memory that the C library keeps after it was freed, instead of returning it to the system."""

import ctypes
import os
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
LARGE = 32 * 2**20  # larger blocks are returned at once
SET = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}


def keep_freed_memory() -> None:
    """Keep freed blocks of up to 32 MiB for the next allocation.

    The system clears memory before it hands it out again, which slows down the train steps of small
    models. glibc sets the same limits itself once a block of 32 MiB is freed, but the tensors of a
    small model are smaller. Other C libraries, and limits from the environment, stay as they are.
    """
    if SET & os.environ.keys() or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(MMAP_THRESHOLD, LARGE)
        mallopt(TRIM_THRESHOLD, 2 * LARGE)
