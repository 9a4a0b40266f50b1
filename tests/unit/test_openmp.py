"""A program that used torch before a run does not slow the run down."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, threading, torch
from paceline.openmp import end_idle_threads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(4)
before = threads()
work = lambda: torch.ones(512, 512) @ torch.ones(512, 512)
work()
print(threads() - before)
end_idle_threads()
print(threads() - before)
work()
print(threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_idle_openmp_threads_end_and_start_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    used, ended, again = map(int, done.stdout.split())
    assert (used, ended, again) == (3, 0, 3)
