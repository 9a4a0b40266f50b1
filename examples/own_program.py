"""Training from a program of your own, with a reward that lives in it. In a notebook, `await train(...)` instead of asyncio.run.

python examples/own_program.py
"""

import asyncio
from typing import Any

from paceline.config import load_config
from paceline.run import train


def score(answer: str, row: dict[str, Any]) -> dict[str, float]:
    """ "reward" is learned from; the other numbers are means in metrics.jsonl, to be looked at."""
    right = float(answer.strip() == row["answer"])
    return {"reward": right - 0.01 * len(answer), "right": right}


class Watch:
    """Is told of every step; as little as you like."""

    def step_done(self, step: int, metrics: dict[str, float], groups: Any) -> None:
        print(
            f"step {step}: reward {metrics['reward/mean']:.2f}, right {metrics['reward_component/right']:.0%}"
        )

    def engines_polled(self, engines: Any, queue_utilization: float) -> None:
        """Every second: what the engines do, and how full the queue is."""


if __name__ == "__main__":
    config = load_config("recipes/hybrid.toml", ["steps=20", "run_dir=runs/own_program"])
    summary = asyncio.run(train(config, lambda first_step: Watch(), fresh=True, reward=score))
    print(
        f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f}; the model is in {config.run_dir}/checkpoints"
    )
