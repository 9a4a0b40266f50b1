"""The tutorials run as printed, in a real Jupyter kernel, an empty directory and an empty home."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.docs.documents import ROOT
from tests.small_runs import steps_of

FOLDER = ROOT / "docs" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.ipynb"))
OF_HOME = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "PACELINE_CACHE", "HF_HOME")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory. The home directory is another empty one."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in OF_HOME:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "work"


def execute(name: str, folder: Path) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=resources).execute()


def test_every_tutorial_is_executed() -> None:
    assert [path.stem for path in TUTORIALS] == ["agent", "gsm8k", "tiny_model"]


def test_tutorial_of_tiny_model_raises_reward_in_both_modes(folder: Path) -> None:
    execute("tiny_model", folder)
    for run in ("runs/tutorial_sync", "runs/tutorial_async"):
        rewards = [row["reward/mean"] for row in steps_of(folder / run)]
        assert len(rewards) == 40
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


def test_tutorial_of_agent_makes_its_steps_with_calls_of_tool(folder: Path) -> None:
    execute("agent", folder)
    turns = [row["episode/turns_mean"] for row in steps_of(folder / "runs/tutorial_agent")]
    assert len(turns) == 10 and max(turns) > 1, turns


def test_tutorial_of_gsm8k_makes_its_steps_with_stand_in(folder: Path) -> None:
    execute("gsm8k", folder)
    assert len(steps_of(folder / "runs/tutorial_gsm8k")) == 2


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_has_no_output_in_repository(path: Path) -> None:
    """Outputs would change with every machine; readers get their own."""
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
