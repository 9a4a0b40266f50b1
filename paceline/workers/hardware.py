"""Devices of a run and what was chosen for them, in words; devices that it cannot use."""

import functools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.types import Role
from paceline.workers.cluster import Device, Node, PlannedWorker

log = logging.getLogger(__name__)

PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
PROBE_TIMEOUT_S = 60.0


def report_devices(
    config: RunConfig, nodes: Sequence[Node], plans: Sequence[PlannedWorker]
) -> None:
    """Log which devices the workers use, and warn about a GPU that torch cannot use."""
    log.info("%s", describe_devices(config, nodes, plans))
    if config.cluster == "local" and (problem := unusable_gpu()):
        log.warning("%s", problem)


def report_choices(choices: Iterable[object]) -> None:
    """Log what was chosen for these devices, a line for each setting."""
    for choice in choices:
        log.info("auto: %s", choice)


def describe_devices(
    config: RunConfig, nodes: Sequence[Node], plans: Sequence[PlannedWorker]
) -> str:
    """Return one line: the devices of each role, the dtype and the engines."""
    devices: dict[str, list[Device]] = {}
    for plan in plans:
        devices.setdefault(" and ".join(role.value for role in plan.roles), []).extend(plan.devices)
    by_name = {node.name: node for node in nodes}
    threads = plans[0].threads
    parts = [f"{roles} on {_where(own, by_name, threads)}" for roles, own in devices.items()]
    generates = any(Role.ROLLOUT in plan.roles for plan in plans)
    engines = f", {_engines(config, plans)}" if generates else ""
    return f"{'; '.join(parts)}; {config.train.dtype}{engines}"


def _engines(config: RunConfig, plans: Sequence[PlannedWorker]) -> str:
    size = config.rollout.ranks
    count = sum(max(1, plan.ranks // size) for plan in plans if Role.ROLLOUT in plan.roles)
    text = f"{config.rollout.engine} engine"
    text = f"{count} {text}s" if count > 1 else text
    return f"{text} of {size} ranks" if size > 1 else text


def _where(devices: Sequence[Device], nodes: dict[str, Node], threads: int) -> str:
    where = []
    for name in dict.fromkeys(device.node for device in devices):
        node, indexes = nodes[name], [d.index for d in devices if d.node == name]
        if node.gpus:
            numbers = ", ".join(map(str, sorted(set(indexes))))
            kind = f" ({node.gpu_name})" if node.gpu_name else ""
            text = f"GPU{'s' if ',' in numbers else ''} {numbers}{kind}"
        else:
            processes = f"{len(indexes)} processes, " if len(indexes) > 1 else ""
            each = " each" if processes else ""
            text = f"CPU ({processes}{threads} thread{'s' if threads > 1 else ''}{each})"
        where.append(f"{text} of {name[:8]}" if len(nodes) > 1 else text)
    return ", ".join(where)


def unusable_gpu() -> str:
    """Return a warning if there is an NVIDIA GPU that torch cannot use."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.cuda.device_count() or hidden or not has_nvidia_gpu():
        return ""
    if torch.version.cuda is None:
        why, what = "it was built without CUDA", "install a CUDA build of torch"
    else:
        why = f"no driver for CUDA {torch.version.cuda} was found"
        what = "check nvidia-smi, and the GPU options of the container if this is one"
    return (
        f"this machine has an NVIDIA GPU, but torch {torch.__version__} cannot use it ({why}): "
        f"the run uses the CPU. To use the GPU, {what}"
    )


def has_nvidia_gpu() -> bool:
    if any(Path("/proc/driver/nvidia/gpus").glob("*")) or any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            kind = vendor.with_name("class").read_text()
            if vendor.read_text().strip() == "0x10de" and kind.startswith("0x03"):
                return True
        except OSError:
            continue
    return False


def check_bfloat16(config: RunConfig) -> None:
    """Raise ConfigError if bfloat16 matmuls would kill a process on this CPU.

    Some virtual machines report AMX and trap on it. Only another process can try that.
    """
    import torch

    if config.train.dtype != "bfloat16" or config.cluster != "local" or torch.cuda.is_available():
        return
    if _traps_on_bfloat16():
        raise ConfigError(
            "train.dtype = 'bfloat16': this CPU reports AMX instructions but traps on them "
            "(SIGILL), which would end the run; use train.dtype=float32, or set the environment "
            "variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
        )


def has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices faster than float32 ones."""
    return _reports("avx512_bf16") and not _traps_on_bfloat16()


def _traps_on_bfloat16() -> bool:
    amx = _reports("amx_bf16") and not os.environ.get("ONEDNN_MAX_CPU_ISA")
    return amx and _bfloat16_crashes()


def _reports(instructions: str) -> bool:
    try:
        return instructions in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def _bfloat16_crashes() -> bool:
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == -signal.SIGILL
