"""`paceline evaluate`: scores every row once, without training."""

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


def test_evaluate_scores_every_row_once(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    (tmp_path / "r.toml").write_text(f'model = "{model}"\nrun_dir = "{tmp_path}/run"\n{RECIPE}')
    (tmp_path / "d.jsonl").write_text(
        "".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(7))
    )
    rewards = Path(__file__).parents[1] / "rewards.py"

    def evaluate(*more: str) -> dict[str, float]:
        settings = [f"data.path={tmp_path}/d.jsonl", f"reward.function={rewards}:in_parts"]
        command = ["evaluate", f"{tmp_path}/r.toml", *settings, "--json", *more]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        metrics: dict[str, float] = json.loads(result.output)
        return metrics

    greedy = evaluate()
    assert (greedy["prompts"], greedy["attempts"], greedy["truncated_fraction"]) == (
        7,
        7,
        1.0,
    ) and "reward_component/length" in greedy
    assert evaluate() == greedy, "greedy completions depend on the seed or the order"
    drawn = evaluate("--attempts", "3")
    assert drawn["attempts"] == 21 and drawn["reward_max"] >= drawn["reward"]
    assert not (tmp_path / "run").exists(), "evaluation wrote a run directory"
