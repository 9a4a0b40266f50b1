"""The wheel, installed outside of the repository: it has every file that a run needs."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]


def build_wheel(target: Path, source: Path = ROOT) -> Path:
    """Build with the installed hatchling: an isolated build would download it."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    output(*command, "--no-index", "--wheel-dir", target, source, cwd=target.parent)
    (wheel,) = target.glob("*.whl")
    return wheel


def output(*command: object, cwd: Path) -> str:
    # PYTHONPATH could lead to the package of the repository.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("build") / "wheels")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the wheel and with the dependencies of this interpreter.

    A path in a .pth file makes the packages of a directory visible, but not what the .pth files in
    that directory refer to. So an editable installation of Paceline stays invisible.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    output(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies))
    return folder


def test_wheel_contains_package_type_marker_recipes_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "paceline").rglob("*.py")}
    recipes = {f"paceline/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    static = (ROOT / "paceline" / "page" / "static").iterdir()
    page = {str(path.relative_to(ROOT)) for path in static}
    commit = {"paceline/commit.txt"} if (ROOT / ".git").exists() else set()
    expected = source | recipes | page | commit | {"paceline/py.typed"}
    assert expected == {name for name in names if ".dist-info/" not in name}


def test_installed_wheel_is_used_instead_of_repository(environment: Path) -> None:
    show = "import paceline; print(paceline.__file__)"
    found = output(environment / "bin" / "python", "-c", show, cwd=environment)
    assert Path(found.strip()).is_relative_to(environment)


def test_installed_command_prints_version_and_settings(environment: Path, wheel: Path) -> None:
    command = environment / "bin" / "paceline"
    version = wheel.name.split("-")[1]
    shown = output(command, "--version", cwd=environment)
    assert shown.startswith(f"paceline {version}\n") and f"torch {torch.__version__} (" in shown
    assert "schedule.max_staleness" in output(command, "settings", cwd=environment)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Create a separate repository with one tagged commit."""
    folder = tmp_path / "repository"
    for name in ("paceline", "recipes"):
        cache = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=cache)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    commands = (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "one"), ("tag", "v9.8.7"))
    for command in commands:
        output("git", *command, cwd=folder)
    return folder


def test_wheel_of_sdist_tells_commit_when_built_at_tag(release: Path, tmp_path: Path) -> None:
    """Between two tags the version has the commit; at a tag it does not."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist"]
    output(*command, "--directory", tmp_path, cwd=release)
    wheel = build_wheel(tmp_path / "wheels", tmp_path / "paceline-9.8.7.tar.gz")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    show = "from paceline.version import describe; print(*describe()[:2], sep='\\n')"
    shown = output(sys.executable, "-c", show, cwd=tmp_path / "installed").splitlines()
    head = output("git", "rev-parse", "HEAD", cwd=release)
    commit = shown[1].removeprefix("commit ")
    assert shown[0] == "paceline 9.8.7" and head.startswith(commit) and len(commit) >= 7


def test_installed_command_finds_recipes_by_name(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin" / "paceline"
    assert "fully_async" in output(command, "recipes", cwd=tmp_path)
    shown = output(command, "train", "fully_async", "steps=3", "--dry-run", cwd=tmp_path)
    assert '"run_dir": "runs/fully_async"' in shown


SMALL = {
    "groups_per_step": 2,
    "group_size": 2,
    "rollout.max_response_length": 4,
    "placement.threads": 1,
}


@pytest.fixture
def folder(model: str, tmp_path: Path) -> Path:
    """Create a folder of a user: a model and prompts."""
    (tmp_path / "model").symlink_to(model)
    rows = [json.dumps({"prompt": f"say {number}", "answer": str(number)}) for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    return tmp_path


def first_program(document: Path, start: str) -> str:
    """Return the first Python block of a document that starts with these words."""
    found = re.search(rf"```python\n({start}.*?)```", document.read_text(), re.DOTALL)
    assert found
    return found[1]


def readme_program() -> str:
    program = first_program(ROOT / "README.md", "import paceline")
    program = program.replace("Qwen/Qwen2.5-0.5B-Instruct", "./model")
    return program.replace("steps=200", f"steps=2, **{SMALL}")


def trl_program() -> str:
    """Return the program of docs/trl.md, with a dataset of this machine instead of the hub's."""
    program = first_program(ROOT / "docs" / "trl.md", "from datasets")
    program = program.replace("from datasets import load_dataset\n", "")
    chats = [[{"role": "user", "content": f"What is {n} + 1?"}] for n in range(8)]
    rows = [{"prompt": chat, "solution": f"${n}$"} for n, chat in enumerate(chats, 1)]
    program, count = re.subn(r"load_dataset\(.*?\)", repr(rows), program)
    assert count == 1
    config = "args=GRPOConfig(max_steps=1, max_completion_length=4, bf16=False)"
    return program.replace('"Qwen/Qwen2-0.5B-Instruct"', f'"./model", {config}')


def loss_program() -> str:
    """Return a program that passes the custom loss as a function, to a trainer in a process."""
    source = (ROOT / "examples" / "custom_loss.py").read_text()
    settings = SMALL | {"run_dir": "runs/loss", "placement.actor": "train"}
    train = "model='./model', data='prompts.jsonl', reward='exact', algorithm={'loss': clip}"
    return f"{source}\nimport paceline\npaceline.train({train}, steps=1, **{settings})\n"


def test_programs_of_documents_and_custom_loss_run_with_wheel(
    environment: Path, folder: Path
) -> None:
    """All programs run in one process, because it takes seconds to start."""
    programs = {"trl.py": trl_program(), "loss.py": loss_program(), "readme.py": readme_program()}
    for name, program in programs.items():
        (folder / name).write_text(program)
    run = "import runpy, sys; [runpy.run_path(name, run_name='__main__') for name in sys.argv[1:]]"
    shown = output(environment / "bin" / "python", "-c", run, *programs, cwd=folder)
    assert (folder / "runs" / "loss" / "metrics.jsonl").read_text().count("\n") == 1
    assert (folder / "my-model" / "model.safetensors").exists()
    assert shown.strip().endswith("runs/default/checkpoints/step_00000002/actor")


def test_installed_command_trains_with_custom_loss(environment: Path, folder: Path) -> None:
    shutil.copy(ROOT / "examples" / "custom_loss.py", folder / "my_loss.py")
    settings = [f"{name}={value}" for name, value in SMALL.items()]
    command = [environment / "bin" / "paceline", "train", "hybrid", "model=./model", "steps=2"]
    output(*command, *settings, "algorithm.loss=my_loss.py:clip", cwd=folder)
    assert (folder / "runs" / "hybrid" / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.slow
def test_export_with_wheel_is_loaded_by_transformers(environment: Path, folder: Path) -> None:
    settings = [f"{name}={value}" for name, value in SMALL.items()]
    command = environment / "bin" / "paceline"
    output(command, "train", "hybrid", "model=./model", "steps=1", *settings, cwd=folder)
    output(command, "export", "runs/hybrid", "--dtype", "bfloat16", "--to", "trained", cwd=folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "trained", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert "Paceline" in (folder / "trained" / "README.md").read_text()
