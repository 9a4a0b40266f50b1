"""`paceline evaluate`: scores every row once, without training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
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


@pytest.fixture
def evaluated(tmp_path: Path) -> Callable[..., dict[str, float]]:
    """Run `paceline evaluate --json` on seven rows and return its result."""
    model = random_model(tmp_path / "model")
    (tmp_path / "r.toml").write_text(f'model = "{model}"\nrun_dir = "{tmp_path}/run"\n{RECIPE}')
    (tmp_path / "d.jsonl").write_text(
        "".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(7))
    )
    rewards = Path(__file__).parents[1] / "rewards.py"

    def run(*more: str) -> dict[str, float]:
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
        metrics: dict[str, float] = json.loads(result.stdout)
        return metrics

    return run


def test_evaluate_prints_only_json_when_a_row_is_left_out(
    evaluated: Callable[..., dict[str, float]], tmp_path: Path
) -> None:
    with (tmp_path / "d.jsonl").open("a") as file:
        file.write('{"prompt": ""}\n')
    found = evaluated("data.on_bad_row=skip")
    assert (found["prompts"], found["failed"]) == (7, 0)


def test_evaluate_scores_every_row_once(
    evaluated: Callable[..., dict[str, float]], tmp_path: Path
) -> None:
    greedy = evaluated()
    assert (greedy["prompts"], greedy["samples"], greedy["truncated_fraction"]) == (
        7,
        7,
        1.0,
    ) and "reward_component/length" in greedy
    assert evaluated() == greedy, "greedy completions depend on the seed or the order"
    sampled = evaluated("--samples", "3")
    assert sampled["samples"] == 21 and sampled["reward_max"] >= sampled["reward"]
    assert not (tmp_path / "run").exists(), "evaluation wrote a run directory"


def test_evaluate_samples_with_top_k_and_top_p(
    evaluated: Callable[..., dict[str, float]],
) -> None:
    """Only the most probable token passes both filters, so every sample is the greedy one."""
    scores = ("reward", "tokens_mean", "reward_component/length")
    greedy = evaluated()
    for narrow in (["rollout.top_k=1"], ["rollout.top_p=1e-6"]):
        sampled = evaluated("-n", "3", *narrow)
        assert sampled["reward_max"] == sampled["reward"] == greedy["reward"], narrow
        assert {name: sampled[name] for name in scores} == {name: greedy[name] for name in scores}


def test_evaluate_samples_single_completion_when_top_k_is_set(
    evaluated: Callable[..., dict[str, float]],
) -> None:
    assert evaluated("rollout.top_k=1") == evaluated()
    hot = ("rollout.top_k=1000", "rollout.temperature=50.0")
    assert evaluated(*hot)["reward"] != evaluated()["reward"]
