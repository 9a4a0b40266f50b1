"""Run directories with the files that the page reads, without training: of any size, in seconds."""

import json
import math
from pathlib import Path
from typing import Any

from paceline.line_file import encode_line

WORDS = ["the", "sum", "of", "two", "even", "numbers", "is", "even", "because", "each", "one"]


def metrics(step: int, steps: int = 100) -> dict[str, Any]:
    """Return the metrics of a step of a run that learns."""
    done = step / steps
    noise = math.sin(step * 12.9898) * 0.04
    return {
        "step": step,
        "wall_time_s": 1.7e9 + 2.5 * step,
        "reward/mean": 0.9 - 0.6 * math.exp(-4 * done) + noise,
        "train/loss": -0.02 * math.exp(-3 * done) + noise / 20,
        "train/entropy": 1.8 * math.exp(-2 * done) + 0.1 + noise / 4,
        "train/grad_norm": 0.6 + 3 * abs(noise),
        "rollout/tokens": 20_000 * (1 + done),
        "rollout/length_mean": 100 + 80 * done,
        "staleness/mean": 1.5 + noise,
        "staleness/max": 2.0,
        "queue/utilization": 0.6 + noise,
        "queue/dropped": float(step // 20),
        "fleet/engines": 2.0,
        "fleet/replaced": float(done > 0.5),
        "time/wait_s": 0.3 + noise,
        "time/train_s": 1.9 + noise,
        "time/sync_s": 0.12 + noise / 2,
        "device/total_s": 5.0,
        "device/generation_s": 2.0 - done,
        "device/training_s": 1.5 + done,
        "device/wait_groups_s": 1.5,
        "device/speed_of_light": 0.6,
        **{f"train/more_{number}": noise * number for number in range(30)},
    }


def distribution(step: int) -> dict[str, Any]:
    counts = {
        "staleness": {"0": 10, "1": 40, "2": 50},
        "length": {str(64 + 8 * n): 10 + (n * step) % 7 for n in range(10)},
        "reward": {"0": max(1, 60 - step), "0.5": 20, "1": 20 + step % 60},
    }
    dropped = {"staleness": {"3": 4}, "length": {"160": 4}, "reward": {"0": 3, "1": 1}}
    return {"step": step, "generated": counts, "trained": counts, "dropped": dropped}


def completion(number: int, words: int, text: str | None = None) -> dict[str, Any]:
    pieces = [text] if text else [f"{WORDS[(number + at) % len(WORDS)]} " for at in range(words)]
    return {
        "reward": (number * 7 % 11) / 10,
        "details": {"format": 1.0, "correct": (number * 7 % 11) / 10},
        "tokens": len(pieces),
        "finish": "length" if number % 9 == 0 else "stop",
        "text": "".join(pieces),
        "token_characters": [len(piece) for piece in pieces],
        "logprobs": [
            -round(abs(math.sin(number + at * 3)) ** 4 * 5, 2) for at in range(len(pieces))
        ],
        "advantages": [[-0.5, len(pieces) // 2], [1.25, -(-len(pieces) // 2)]],
        "versions": [[number % 5, len(pieces) // 2], [number % 5 + 1, -(-len(pieces) // 2)]],
    }


def group(step: int, number: int, completions: int, words: int = 30) -> dict[str, Any]:
    first = (step * 31 + number) * completions
    return {
        "step": step,
        "seq": first,
        "uid": f"train.jsonl:{first}",
        "staleness": step % 3,
        "prompt": f"Question {step}.{number}: is the sum of two even numbers even?",
        "completions": [completion(first + at, words) for at in range(completions)],
    }


def write_run(
    run_dir: Path,
    steps: int,
    groups: int = 1,
    completions: int = 4,
    words: int = 30,
    **settings: Any,
) -> Path:
    """Write a finished run."""
    run_dir.mkdir(parents=True)
    numbers = range(1, steps + 1)
    files = {
        "metrics": (metrics(step, steps) for step in numbers),
        "distributions": map(distribution, numbers),
        "evaluations": (
            {"step": step, "reward": 0.3 + 0.6 * step / steps} for step in (0, *numbers[9::10])
        ),
        "samples": (group(step, n, completions, words) for step in numbers for n in range(groups)),
    }
    for name, rows in files.items():
        with (run_dir / f"{name}.jsonl").open("wb") as file:
            file.writelines(map(encode_line, rows))
    config = {"steps": steps, "model": "tiny", "train": {"learning_rate": 1e-4}, **settings}
    (run_dir / "settings.json").write_text(json.dumps(config))
    (run_dir / "summary.json").write_text(json.dumps({"steps": steps, "wall_s": 2.5 * steps}))
    return run_dir


def append(run_dir: Path, name: str, row: dict[str, Any]) -> None:
    with (run_dir / f"{name}.jsonl").open("ab") as file:
        file.write(encode_line(row))
