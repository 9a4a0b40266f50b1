"""Training from a Python program, with a reward function and a stop rule of the program.

python examples/custom_program.py
"""

from typing import Any

import paceline


def score(completion: str, row: dict[str, Any]) -> dict[str, float]:
    """Return "reward", which is trained on, and components, which are recorded in metrics.jsonl."""
    correct = float(completion.strip() == row["answer"])
    return {"reward": correct - 0.01 * len(completion), "correct": correct}


def main(**settings: Any) -> paceline.Run:
    steps = paceline.steps(data="reverse:3", reward=score, steps=50, **settings)
    for step in steps:
        correct = step.metrics["reward_component/correct"]
        print(f"step {step.step}: reward {step.reward:.2f}, correct {correct:.0%}")
        if correct > 0.8:
            break
    return steps.stop()  # waits for the last checkpoint


if __name__ == "__main__":
    run = main(run_dir="runs/custom_program", fresh=True)
    print(f"reward {run.summary['reward_first']:.2f} -> {run.summary['reward_last']:.2f}")
    print(f"trained model: {run.checkpoint}")
