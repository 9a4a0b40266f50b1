"""GPUs, their driver, and whether torch can use them. Asks nvidia-smi and reads torch's files."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from paceline.doctor.finding import Finding, ok, problem, warning
from paceline.workers.hardware import has_nvidia_gpu

QUERY = "name,memory.total,memory.free,driver_version,uuid"
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDES_ALL = ("", "-1")
TIMEOUT_S = 10.0
MIN_FREE = 0.5  # of the memory of a GPU


def check_devices(program: str = "nvidia-smi", min_gpus: int = 0) -> Iterator[Finding]:
    """Yield the findings about the GPUs that a run would use.

    `program`: nvidia-smi, which lists all GPUs. `min_gpus`: see placement.min_gpus.
    """
    lines = _query(program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits").splitlines()
    gpus = [[part.strip() for part in line.split(",")] for line in lines]
    chosen = os.environ.get(VISIBLE)
    used = visible_gpus([uuid for *_, uuid in gpus], chosen)
    if min_gpus > len(used):
        yield problem(
            "GPUs",
            f"{len(used)} found; placement.min_gpus = {min_gpus}",
            f"check nvidia-smi and {VISIBLE}, or lower placement.min_gpus",
        )
    if gpus and chosen is not None:
        yield _check_choice(chosen, len(used), len(gpus))
    if not used:
        yield _check_cpu(bool(gpus) or chosen in HIDES_ALL)
        return
    for number in used:
        yield _check_gpu(number, *gpus[number])
    yield _check_cuda(torch_cuda(), _query(program))


def visible_gpus(uuids: Sequence[str], chosen: str | None) -> list[int]:
    """Return the numbers of the GPUs that CUDA_VISIBLE_DEVICES = `chosen` leaves, in its order."""
    if chosen is None or "MIG-" in chosen:  # nvidia-smi does not list parts of GPUs
        return list(range(len(uuids)))
    found: list[int] = []
    for part in (part.strip() for part in chosen.split(",")):
        named = [n for n, uuid in enumerate(uuids) if part and uuid.startswith(part)]
        number = int(part) if part.isdecimal() else named[0] if len(named) == 1 else -1
        if not 0 <= number < len(uuids):
            break  # CUDA ignores it and all that follow
        found.append(number)
    return found


def _check_choice(chosen: str, used: int, count: int) -> Finding:
    text = f"{chosen!r}: runs use {used} of {count} GPUs"
    if chosen in HIDES_ALL or used == len(chosen.split(",")) or "MIG-" in chosen:
        return ok(VISIBLE, text)
    advice = "use the numbers or UUIDs of nvidia-smi -L; CUDA ignores what follows a wrong one"
    return warning(VISIBLE, text, advice)


def _check_cpu(hidden: bool) -> Finding:
    if not hidden and has_nvidia_gpu():
        return warning(
            "GPU",
            "there is an NVIDIA GPU, but nvidia-smi lists none; runs use the CPU",
            "install the driver; in a container, start it with its GPU options (--gpus all)",
        )
    return ok("GPU", "none; runs use the CPU")


def _check_gpu(number: int, name: str, total: str, free: str, driver: str, uuid: str) -> Finding:
    text = f"{name}, {_gib(free)} of {_gib(total)} GiB free, driver {driver}"
    if free.isdigit() and total.isdigit() and int(free) < MIN_FREE * int(total):
        return warning(
            f"GPU {number}",
            text,
            f"another process uses it: end that process, or choose others with {VISIBLE}",
        )
    return ok(f"GPU {number}", text)


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for; None without CUDA or without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b.*?['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _check_cuda(built_for: str | None, report: str) -> Finding:
    if built_for is None:
        return problem(
            "CUDA",
            "torch was built without CUDA, so runs cannot use the GPU",
            "install a CUDA build of torch (https://pytorch.org/get-started)",
        )
    found = re.search(r"CUDA Version:\s*([\d.]+)", report)
    if found is None:
        return ok("CUDA", f"torch was built for {built_for}")
    text = f"torch was built for {built_for}, the driver supports up to {found[1]}"
    if int(built_for.split(".")[0]) > int(found[1].split(".")[0]):
        return problem("CUDA", text, f"update the driver, or install torch for CUDA {found[1]}")
    return ok("CUDA", text)


def _query(program: str, *options: str) -> str:
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *options], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _gib(mebibytes: str) -> str:
    return f"{int(mebibytes) / 1024:.0f}" if mebibytes.isdigit() else "?"
