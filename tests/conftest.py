"""Environment of every test, set before torch is imported, and the markers of tests."""

import os
import signal
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fault_report import Fault, FaultReport, fault_of

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


FAULT = pytest.StashKey[Fault]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write a table of all faults that marked tests inject"
    parser.addoption("--fault-report", metavar="FILE", type=Path, help=text)
    text = "join the table with those of earlier calls, whose rows this file has"
    parser.addoption("--fault-rows", metavar="FILE", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("fault_report", None)
    if file and not hasattr(config, "workerinput"):  # the workers of xdist only send their rows
        rows = config.getoption("fault_rows")
        config.pluginmanager.register(FaultReport(file, config.rootpath, rows))


def pytest_itemcollected(item: pytest.Item) -> None:
    item.stash[FAULT] = fault_of(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    yield
    item.stash[FAULT].check()


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Fault:
    """Return what a test with the marker `fault` calls when its fault has happened."""
    found: Fault = request.node.stash[FAULT]
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the directory of a small random model. Tests must not change it."""
    from tests.models import random_model  # imports torch

    return random_model(tmp_path_factory.mktemp("model"))
