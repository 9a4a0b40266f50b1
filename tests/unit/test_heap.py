"""A run does not ask the system again for memory that it has freed."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from paceline.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [bytearray(2**19) for _ in range(40)]
        while blocks:
            blocks.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if "keep" in sys.argv:
    keep_freed_memory()
faults()
print(faults())
"""


def faults(*args: str, **limits: str) -> int:
    usual = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *args], stdout=subprocess.PIPE, env=usual | limits
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets parameters of glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert faults() > 10_000  # of 400 blocks with 128 pages each
    assert faults("keep") < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets parameters of glibc")
def test_limits_of_environment_stay() -> None:
    assert faults("keep", MALLOC_MMAP_THRESHOLD_="65536") > 10_000
