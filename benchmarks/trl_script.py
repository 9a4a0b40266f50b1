"""A GRPO script as its author wrote it for TRL, which runs under TRL and under Paceline.

    python benchmarks/trl_script.py trl MODEL OUTPUT_DIR
    python benchmarks/trl_script.py paceline.trl MODEL OUTPUT_DIR

The first argument is the only difference: the module that GRPOConfig and GRPOTrainer come from. A
model learns to write digits. The last line of the output is JSON: the reward of each log entry, the
seconds of `trainer.train()`, and those of an update, logged after the first entry.
"""

import importlib
import json
import random
import sys
import time
from typing import Any

STEPS = 40


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """Return the fraction of characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def long(completion_ids: list[list[int]], limit: list[int], **kwargs: Any) -> list[float]:
    """Prefer long completions; the limit is a column of the dataset."""
    return [len(ids) / most for ids, most in zip(completion_ids, limit, strict=True)]


def main(library: str, model: str, output_dir: str, steps: int = STEPS) -> None:
    trl = importlib.import_module(library)
    numbers = random.Random(0)
    rows = [
        {"prompt": "say " + "".join(numbers.choices("0123456789", k=7)), "limit": 64}
        for _ in range(256)
    ]
    args = trl.GRPOConfig(
        output_dir=output_dir,
        max_steps=steps,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=64,
        learning_rate=3e-3,
        reward_weights=[1.0, 0.1],
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=[digits, long],
        args=args,
        train_dataset=dataset(rows),
    )
    begun = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begun
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    result = {
        "seconds": seconds,
        "reward": [entry["reward"] for entry in entries],
        "digits": [entry["rewards/digits/mean"] for entry in entries],
        "length": [entry["completions/mean_length"] for entry in entries],
        "step_s": [entry["step_time"] for entry in entries[1:]],
        "steps": trainer.state.global_step,
    }
    print("\n" + json.dumps(result))


def dataset(rows: list[dict[str, Any]]) -> Any:
    """Return a `datasets.Dataset`, which TRL needs, or the rows where the library is missing."""
    try:
        from datasets import Dataset
    except ImportError:
        return rows
    return Dataset.from_list(rows)


if __name__ == "__main__":
    library, model, output_dir, *steps = sys.argv[1:]
    main(library, model, output_dir, *map(int, steps))
