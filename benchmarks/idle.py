"""An idle machine, for which a benchmark waits before it measures."""

import time

import psutil


def wait_idle(limit_s: float) -> None:
    """Wait until the machine is idle, at most `limit_s`: other load would distort the result."""
    ends = time.monotonic() + limit_s
    while psutil.cpu_percent(0.5) > 15 and time.monotonic() < ends:
        pass
