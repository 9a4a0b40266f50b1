"""Files of deploy/, checked by the validators of their tools. Nothing is deployed."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.docs.commands import check_paceline
from tests.docs.documents import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = "1.31"
CHECK_TASK = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(json.dumps([task.num_nodes, task.setup, task.run]))
"""


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return loaded


def tool(name: str, *arguments: object, text: str | None = None) -> None:
    """Run a validator that is installed beside this interpreter."""
    command = [str(Path(sys.prefix, "bin", name)), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def check_task(path: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Load a task with SkyPilot, whose environment `make test-docs` creates."""
    python = ROOT / ".venv-sky" / "bin" / "python"
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    command = [python, "-c", CHECK_TASK, path]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def cluster_specs() -> dict[str, dict[str, Any]]:
    cluster = load("kuberay-cluster.yaml")["spec"]
    return {"cluster": cluster, "job": load("kuberay-job.yaml")["spec"]["rayClusterSpec"]}


def test_slurm_script_passes_shellcheck() -> None:
    tool("shellcheck", DEPLOY / "slurm.sh")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_container_file_passes_hadolint(name: str) -> None:
    tool("hadolint", "--failure-threshold", "warning", DEPLOY / f"{name}.Dockerfile")


def test_skypilot_accepts_task(tmp_path: Path) -> None:
    done = check_task(DEPLOY / "skypilot.yaml", tmp_path)
    assert done.returncode == 0, done.stderr
    nodes, setup, run = json.loads(done.stdout.splitlines()[-1])
    assert nodes == 2
    for script in (setup, run):
        tool("shellcheck", "--shell=bash", "-", text=script)


def test_skypilot_rejects_task_when_key_is_misspelled(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text((DEPLOY / "skypilot.yaml").read_text().replace("num_nodes", "num_node"))
    assert "num_node" in check_task(task, tmp_path).stderr


@pytest.mark.parametrize("name", ["cluster", "job"])
def test_kubernetes_accepts_pods_of_ray_cluster(name: str) -> None:
    spec = cluster_specs()[name]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        kubernetes_validate.validate(pod | group["template"], KUBERNETES, strict=True)
        # Ray's parameters are options of `ray start`, so KubeRay expects strings.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_ray_job_has_cluster_of_ray_cluster() -> None:
    specs = cluster_specs()
    assert specs["job"] == specs["cluster"]


def test_ray_job_runs_valid_command() -> None:
    program, *arguments = shlex.split(load("kuberay-job.yaml")["spec"]["entrypoint"])
    assert program == "paceline"
    check_paceline(arguments)


def test_skypilot_task_runs_valid_command() -> None:
    variables = load("skypilot.yaml")["envs"]
    check_paceline(["train", variables["RECIPE"], "cluster=ray", variables["SETTINGS"]])
