"""GPUs, their driver, and whether torch can use them. Asks nvidia-smi and reads torch's files."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from paceline.doctor.finding import Finding, ok, problem, warning
from paceline.workers.hardware import has_nvidia_gpu

QUERY = "name,memory.total,memory.free,driver_version"
TIMEOUT_S = 10.0
MIN_FREE = 0.5  # of the memory of a GPU


def check_devices(program: str = "nvidia-smi", min_gpus: int = 0) -> Iterator[Finding]:
    """Yield the findings about GPUs. `program` and `min_gpus`: see placement.min_gpus."""
    gpus = _query(program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits").splitlines()
    if min_gpus > len(gpus):
        yield problem(
            "GPUs",
            f"{len(gpus)} found; placement.min_gpus = {min_gpus}",
            "check nvidia-smi, or lower placement.min_gpus",
        )
    if not gpus:
        if has_nvidia_gpu():
            yield warning(
                "GPU",
                "there is an NVIDIA GPU, but nvidia-smi lists none; runs use the CPU",
                "install the driver; in a container, start it with its GPU options (--gpus all)",
            )
        else:
            yield ok("GPU", "none; runs use the CPU")
        return
    for number, line in enumerate(gpus):
        name, total, free, driver = (part.strip() for part in line.split(","))
        text = f"{name}, {_gib(free)} of {_gib(total)} GiB free, driver {driver}"
        if free.isdigit() and total.isdigit() and int(free) < MIN_FREE * int(total):
            yield warning(
                f"GPU {number}",
                text,
                "another process uses it: end that process, or choose others with "
                "CUDA_VISIBLE_DEVICES",
            )
        else:
            yield ok(f"GPU {number}", text)
    yield _check_cuda(torch_cuda(), _query(program))


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
