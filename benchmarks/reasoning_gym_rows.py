"""Rows of Reasoning Gym as files and their reward, for machines without the package.

    pip install reasoning-gym==0.1.25
    python benchmarks/reasoning_gym_rows.py FOLDER

Writes FOLDER/train.jsonl and FOLDER/test.jsonl: questions of the task needle_haystack, for example
"Tayo accepts the color red. Hubert values pandas. Who accepts the color red? Reply only with a
name." All questions are different. The seed is fixed.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TASK = "needle_haystack"
SETTINGS = {"min_num_statements": 3, "max_num_statements": 5}
SEED = 0
TRAIN, HELD_OUT = 2000, 500


def rows() -> list[dict[str, Any]]:
    """Return different questions with the names in each."""
    import reasoning_gym

    made: dict[str, dict[str, Any]] = {}
    size = 2 * (TRAIN + HELD_OUT)
    for entry in reasoning_gym.create_dataset(TASK, seed=SEED, size=size, **SETTINGS):
        prompt = entry["question"]
        story = prompt.rpartition("\n")[0]
        names = [sentence.split()[0] for sentence in story.split(". ") if sentence.strip()]
        made.setdefault(prompt, {"prompt": prompt, "answer": entry["answer"], "names": names})
    return list(made.values())[: TRAIN + HELD_OUT]


def named(completion: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the last name of the question in the completion is the answer, 0 otherwise.

    Reasoning Gym scores an extracted answer in the same way: equal except for case and spaces.
    """
    names = "|".join(map(re.escape, row["names"]))
    found = re.findall(rf"(?<!\w)(?:{names})(?!\w)", completion, re.IGNORECASE)
    last = found[-1].lower() if found else None
    return float(last == row["answer"].lower())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    made = rows()
    for name, part in (("test", made[:HELD_OUT]), ("train", made[HELD_OUT:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
        print(f"{name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
