"""Environment of every test, set before torch is imported, and the markers of directories."""

import os
import signal
from importlib.util import find_spec

import pytest

# Shells start background jobs with SIGINT ignored, and processes inherit that: a program that a
# test interrupts would go on.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With several processes on few cores, spinning threads cost more than they give.
os.environ["OMP_NUM_THREADS"] = "1"
# Some virtual machines report AMX and then trap on it: bfloat16 matmuls would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

if find_spec("hypothesis"):  # the environments of vLLM and TRL do not have it
    from hypothesis import settings

    # Two test processes and a coverage measurement make single examples slow, not wrong.
    settings.register_profile("paceline", deadline=None)
    settings.load_profile("paceline")


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "slow":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the directory of a small random model. Tests must not change it."""
    from tests.models import random_model  # imports torch

    return random_model(tmp_path_factory.mktemp("model"))
