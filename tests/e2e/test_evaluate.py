"""`paceline evaluate`: a model on every row, once, without training."""

import json
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app
from tests.models import random_model

RECIPE = """
steps = 2
group_size = 4
[data]
max_prompt_length = 32
[rollout]
max_response_length = 4
slots = 3
[algorithm]
name = "ppo"
[placement]
actor = "train"
rollout = "rollout"
threads = 1
"""


def test_every_row_is_scored_once_and_greedy_or_several_times(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    (tmp_path / "r.toml").write_text(f'model = "{model}"\nrun_dir = "{tmp_path}/run"\n{RECIPE}')
    (tmp_path / "d.jsonl").write_text(
        "".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(7))
    )
    rewards = Path(__file__).parents[1] / "rewards.py"

    def evaluated(*more: str) -> dict[str, float]:
        command = [
            "evaluate",
            f"{tmp_path}/r.toml",
            f"data.path={tmp_path}/d.jsonl",
            f"reward.function={rewards}:in_parts",
            "--json",
            *more,
        ]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        found: dict[str, float] = json.loads(result.output)
        return found

    greedy = evaluated()
    assert (greedy["prompts"], greedy["attempts"], greedy["truncated_fraction"]) == (
        7,
        7,
        1.0,
    ) and "reward_component/length" in greedy
    assert evaluated() == greedy, "greedy answers do not depend on chance or order"
    drawn = evaluated("--attempts", "3")
    assert drawn["attempts"] == 21 and drawn["reward_max"] >= drawn["reward"]
    assert not (tmp_path / "run").exists(), "nothing is left behind"
