"""The wheel, installed outside of the repository: it has every file that a run needs."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import paceline
from tests.models import random_model

ROOT = Path(__file__).parents[2]
RECIPE = """
model = "{model}"
run_dir = "run"
steps = 2
groups_per_step = 2
group_size = 2
[data]
task = "copy:3"
max_prompt_length = 32
[rollout]
max_response_length = 4
[placement]
threads = 1
"""


def build_wheel(target: Path) -> Path:
    """Build with the installed hatchling: an isolated build would download it."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    output(*command, "--no-index", "--wheel-dir", target, ROOT, cwd=target.parent)
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
    expected = source | recipes | {"paceline/py.typed"}
    assert expected == {name for name in names if ".dist-info/" not in name}


def test_installed_wheel_is_used_instead_of_repository(environment: Path) -> None:
    show = "import paceline; print(paceline.__file__)"
    found = output(environment / "bin" / "python", "-c", show, cwd=environment)
    assert Path(found.strip()).is_relative_to(environment)


def test_installed_command_prints_version_and_settings(environment: Path) -> None:
    command = environment / "bin" / "paceline"
    assert paceline.__version__ in output(command, "--version", cwd=environment)
    assert "schedule.max_staleness" in output(command, "settings", cwd=environment)


def test_installed_command_finds_recipes_by_name(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin" / "paceline"
    assert "fully_async" in output(command, "recipes", cwd=tmp_path)
    shown = output(command, "train", "fully_async", "steps=3", "--dry-run", cwd=tmp_path)
    assert '"run_dir": "runs/fully_async"' in shown


def test_installed_command_trains_two_steps(environment: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=random_model(tmp_path / "model")))
    output(environment / "bin" / "paceline", "train", recipe, cwd=tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
