"""Training from a Python program, with a reward function and an observer defined in the program.

    python examples/custom_program.py

In a notebook, write `await train(...)` instead of `asyncio.run(train(...))`.
"""

import asyncio
from typing import Any

from paceline.config import load_config
from paceline.run import train


def score(completion: str, row: dict[str, Any]) -> dict[str, float]:
    """Return "reward", which is trained on, and components, which are recorded in metrics.jsonl."""
    correct = float(completion.strip() == row["answer"])
    return {"reward": correct - 0.01 * len(completion), "correct": correct}


class StepPrinter:
    """Observer that prints one line per train step."""

    def step_done(self, step: int, metrics: dict[str, float], groups: Any) -> None:
        reward, correct = metrics["reward/mean"], metrics["reward_component/correct"]
        print(f"step {step}: reward {reward:.2f}, correct {correct:.0%}")

    def engines_polled(self, engines: Any, queue_utilization: float) -> None:
        """Receive engine statistics and the fill level of the queue, once per second."""


if __name__ == "__main__":
    config = load_config("recipes/hybrid.toml", ["steps=20", "run_dir=runs/custom_program"])
    summary = asyncio.run(train(config, lambda first_step: StepPrinter(), fresh=True, reward=score))
    print(f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f}")
    print(f"checkpoints: {config.run_dir}/checkpoints")
