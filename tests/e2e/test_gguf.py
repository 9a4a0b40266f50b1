"""Runs of a GGUF model, and the command that converts one."""

import fcntl
import io
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import app
from paceline.model.loading import load_model, load_tokenizer
from paceline.observe.terminal import ModelProgress

pytest.importorskip("gguf")
from paceline.model import gguf_conversion
from tests.gguf_files import random_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file, path = random_gguf(tmp_path / "model.gguf"), tmp_path / "recipe.toml"
    path.write_text(
        f'model = "{file}"\nrun_dir = "{tmp_path}/run"\n'
        "steps = 1\ngroups_per_step = 2\ngroup_size = 2\n"
        '[data]\ntask = "copy:3"\nlimit = 256\nmax_prompt_length = 32\n'
        "[rollout]\nmax_response_length = 4\n[placement]\nthreads = 1\n"
    )
    return path


def paceline(*args: object) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result


def converted(cache: Path) -> Path:
    return next(path for path in cache.iterdir() if path.is_dir())


def test_model_get_writes_directory_and_prints_it(tmp_path: Path, cache: Path) -> None:
    file, folder = random_gguf(tmp_path / "model.gguf"), tmp_path / "converted"
    output = paceline("model", "get", file, folder).output
    assert f"converting {file} (only once): " in output
    assert f"{file}: {folder} (" in output
    assert load_model(str(folder)).config.hidden_size == 64
    assert load_tokenizer(str(folder)).eos_token_id == 2


def test_model_get_without_directory_serves_later_runs(
    recipe: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = paceline("model", "get", tmp_path / "model.gguf").output
    assert str(converted(cache)) in output
    monkeypatch.delattr(gguf_conversion, "write_model")  # a second conversion would fail
    output = paceline("train", recipe).output
    assert "converting" not in output
    assert output.count(f"model: {converted(cache)}, converted from ") == 1
    assert load_model(str(tmp_path / "run/checkpoints/step_00000001/actor"))


def test_model_list_names_conversion_and_its_file(tmp_path: Path, cache: Path) -> None:
    assert f"no converted models in {cache}" in paceline("model", "list").output
    file = random_gguf(tmp_path / "model.gguf")
    paceline("model", "get", file)
    output = paceline("model", "list").output
    assert f"{converted(cache)} (" in output and f"of {file}" in output
    assert "unused" not in output
    file.unlink()
    assert "unused" in paceline("model", "list").output


def test_model_clear_removes_only_unused_conversions(tmp_path: Path, cache: Path) -> None:
    for name in ("old", "new"):
        paceline("model", "get", random_gguf(tmp_path / f"{name}.gguf"))
    (tmp_path / "old.gguf").unlink()
    assert "removed" in paceline("model", "clear").output
    assert converted(cache).name.startswith("new-")
    assert [path.is_dir() for path in cache.glob("[!.]*")] == [True]
    paceline("model", "clear", "--all")
    assert not list(cache.glob("[!.]*"))


def test_model_clear_leaves_conversion_in_progress(cache: Path) -> None:
    temporary = cache / ".model-0123456789ab-x1y2z3_4"
    temporary.mkdir(parents=True)
    with (cache / ".model-0123456789ab.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        paceline("model", "clear", "--all")
        assert temporary.exists()
    paceline("model", "clear")
    assert not temporary.exists(), "nothing writes it any more"


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_run_converts_gguf_file_by_itself(command: str, recipe: Path, cache: Path) -> None:
    output = paceline(command, recipe).output
    assert "converting" in output
    assert output.count(f"model: {converted(cache)}, converted from ") == 1


def test_plan_for_other_devices_does_not_convert(recipe: Path, cache: Path) -> None:
    assert "rollout" in paceline("plan", recipe, "--devices", "1:80GB").output
    assert not cache.exists()


def test_conversion_has_panel_with_bar() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    with (
        console.status("loading …") as status,
        ModelProgress(console, status) as progress,
    ):
        progress("model.gguf", 1 * 10**6, 4 * 10**6)
        progress("model.gguf", 4 * 10**6, 4 * 10**6)
    assert "converting model.gguf (only once)" in output.getvalue()
    assert "4.0/4.0 MB" in output.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_conversion_shows_name_of_teacher_after_model(is_terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=80)
    with ModelProgress(console) as progress:
        for name in ("model.gguf", "teacher.gguf"):
            progress(name, 0, 10**6)
            progress(name, 10**6, 10**6)
    for name in ("model.gguf", "teacher.gguf"):
        assert f"converting {name} (only once)" in output.getvalue()
