"""Shell completion, as bash and zsh ask for it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.completion import complete_recipe, complete_setting, complete_sft_setting


def completed(line: str) -> list[str]:
    words = line.split(" ")
    asked = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    return CliRunner().invoke(app, env=asked, prog_name="paceline").output.split()


def test_shell_completes_commands_recipes_and_settings() -> None:
    assert completed("paceline doc") == ["doctor"]
    assert completed("paceline train fully") == ["fully_async"]
    assert completed("paceline train fully_async steps=3 schedule.max_s") == [
        "schedule.max_staleness="
    ]


def test_values_of_choices_are_completed() -> None:
    assert complete_setting("cluster=") == ["cluster=local", "cluster=ray"]
    assert complete_setting("schedule.on_sync=d") == ["schedule.on_sync=drain"]
    assert complete_setting("algorithm.dynamic_sampling=t") == ["algorithm.dynamic_sampling=true"]
    assert complete_setting("steps=") == []


def test_supervised_settings_are_completed() -> None:
    assert "validation.rows=" in complete_sft_setting("validation.")


def test_recipe_files_and_directories_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my.toml").touch()
    (tmp_path / "mine" / "my.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert complete_recipe("mi") == ["mine/"]
    assert complete_recipe("mine/m") == ["mine/my.toml"]
    assert complete_recipe("missing/") == []


def test_home_of_unknown_user_has_no_recipes() -> None:
    assert complete_recipe("~no-such-user/") == []
