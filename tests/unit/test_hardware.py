"""Hardware: the devices of a run in words, and devices that would fail or stay unused."""

import io
import logging
from collections.abc import Sequence

import pytest
import torch
from rich.console import Console

from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.observe.terminal import DeviceLines
from paceline.workers import hardware
from paceline.workers.cluster import Node
from paceline.workers.hardware import check_bfloat16, describe_devices, report_devices, unusable_gpu
from paceline.workers.pools import plan_workers

LAPTOP = Node("local", 4, cores=(0, 1, 2, 3))
SERVER = Node("local", 16, 4, gpu_name="NVIDIA H200")
CLUSTER = (Node("first-machine", 16, 2), Node("second-machine", 16, 2))


def described(nodes: Sequence[Node], *overrides: str) -> str:
    config = load_config(overrides=["data.task=sort:5", *overrides])
    return describe_devices(config, nodes, plan_workers(config, nodes))


def test_description_names_devices_of_every_role() -> None:
    separate = ("placement.rollout=engines", "train.dtype=bfloat16")
    assert described([LAPTOP]) == "actor and rollout on CPU (4 threads); float32, native engine"
    assert described([SERVER]) == (
        "actor and rollout on GPU 0 (NVIDIA H200); float32, native engine"
    )
    assert described([LAPTOP], *separate) == (
        "actor on CPU (2 threads); rollout on CPU (2 threads); bfloat16, native engine"
    )
    assert described([SERVER], *separate, "placement.rollout_workers=2", "rollout.engine=vllm") == (
        "actor on GPU 0 (NVIDIA H200); rollout on GPUs 1, 2 (NVIDIA H200); bfloat16, 2 vllm engines"
    )
    sharded = ("train.backend=fsdp", "placement.train_ranks=2")
    assert described([LAPTOP], *separate, *sharded) == (
        "actor on CPU (2 processes, 1 thread each); rollout on CPU (1 thread); "
        "bfloat16, native engine"
    )
    assert described(CLUSTER, *separate, *sharded) == (
        "actor on GPUs 0, 1 of first-ma; rollout on GPUs 0, 1 of second-m; "
        "bfloat16, 2 native engines"
    )
    hybrid = "actor and rollout on CPU (2 processes, 2 threads each); float32"
    assert described([LAPTOP], *sharded) == f"{hybrid}, 2 native engines"
    larger = ("rollout.engine=vllm", "rollout.tensor_parallel=2")
    assert described([LAPTOP], *sharded, *larger) == f"{hybrid}, vllm engine of 2 ranks"


def test_console_shows_devices_once() -> None:
    config = load_config(overrides=["data.task=sort:5"])
    plans = plan_workers(config, [LAPTOP])
    console = Console(width=40, record=True, file=io.StringIO())
    with DeviceLines(console):
        report_devices(config, [LAPTOP], plans)
    report_devices(config, [LAPTOP], plans)
    assert console.export_text() == describe_devices(config, [LAPTOP], plans) + "\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU of this machine")
def test_warning_names_reason_when_torch_cannot_use_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: False)
    assert unusable_gpu() == ""
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA): the run uses the CPU" in unusable_gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no driver for CUDA 13.0 was found" in unusable_gpu()
    config = load_config(overrides=["data.task=sort:5"])
    with caplog.at_level(logging.WARNING):
        report_devices(config, [LAPTOP], plan_workers(config, [LAPTOP]))
    assert "To use the GPU, check nvidia-smi" in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unusable_gpu() == "", "the user does not want it"


def test_check_rejects_bfloat16_when_cpu_traps_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sends itself the signal stands for a CPU that traps."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "_reports", lambda instructions: True)
    trap = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(hardware, "PROBE", trap)
    hardware._bfloat16_crashes.cache_clear()
    narrow = load_config(overrides=["train.dtype=bfloat16"])
    check_bfloat16(narrow)  # the tests set ONEDNN_MAX_CPU_ISA
    assert hardware.has_fast_bfloat16()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    check_bfloat16(load_config())
    try:
        with pytest.raises(ConfigError, match=r"use train\.dtype=float32, or set .*AVX512"):
            check_bfloat16(narrow)
        assert not hardware.has_fast_bfloat16()
    finally:
        hardware._bfloat16_crashes.cache_clear()


def test_device_lines_restore_log_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(hardware.__name__)
    monkeypatch.setattr(logger, "level", logging.ERROR)
    with DeviceLines(Console(quiet=True)):
        assert logger.level == logging.INFO
    assert logger.level == logging.ERROR
