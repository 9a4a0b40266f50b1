"""The recipe with all four models: actor, critic, reference and reward model."""

from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import load_config
from paceline.types import Role
from paceline.workers.cluster import Node
from paceline.workers.pools import plan_workers
from tests.small_runs import steps_of

RECIPE = Path(__file__).parents[2] / "recipes" / "four_models.toml"


def test_recipe_of_four_models_trains(tmp_path: Path) -> None:
    settings = [f"run_dir={tmp_path}", "steps=2", "groups_per_step=4", "group_size=4"]
    result = CliRunner().invoke(app, ["train", str(RECIPE), *settings])
    assert result.exit_code == 0, result.output
    last = steps_of(tmp_path)[-1]
    assert last["step"] == 2 and last["reward/mean"] != 0
    assert last["critic/updates"] == 1 and "train/kl_reference" in last


def test_recipe_of_four_models_uses_two_machines() -> None:
    nodes = [Node("a", 64, gpus=8), Node("b", 64, gpus=8)]
    first, second = plan_workers(load_config(RECIPE), nodes)
    assert {device.node for device in first.devices} == {"a"} and first.ranks == 8
    assert {device.node for device in second.devices} == {"b"} and second.ranks == 8
    assert set(second.roles) == {Role.CRITIC, Role.REWARD}
