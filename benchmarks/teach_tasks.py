"""Tasks of teach.py: rows, reward and settings of each."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import countdown, reasoning_gym_rows, staff

Rows = list[dict[str, Any]]
ANNOTATION = re.compile(r"<<.*?>>")  # of a calculator, in the answers of GSM8K
GSM8K = {
    "data.prompt_key": "question",
    "data.system": "Reason step by step, briefly. Give the result as a number at the very end.",
    "data.max_prompt_length": 400,
    "data.on_bad_row": "skip",
    "algorithm.aggregation": "token",  # as TRL's default
    "train.lr_schedule": "linear",
}


@dataclass(frozen=True, slots=True)
class Task:
    reward: Any
    settings: dict[str, Any]
    every: int  # steps between evaluations
    steps: int
    rows: Callable[[int, int], Iterator[dict[str, Any]]] | None = None  # None: from files
    cpu: dict[str, Any] = field(default_factory=dict)  # smaller, for two cores
    sft: dict[str, Any] | None = None  # supervised fine-tuning on the answers comes first


def sums(count: int, seed: int, largest: int = 30) -> Iterator[dict[str, Any]]:
    """Yield different sums of two numbers; up to 30, a small model sometimes solves them."""
    pairs = list(product(range(2, largest + 1), repeat=2))
    random.Random(seed).shuffle(pairs)
    for first, second in pairs[:count]:
        text = f"What is {first} + {second}? Answer with the number."
        yield {"prompt": text, "answer": str(first + second)}


TASKS = {
    "gsm8k": Task(
        "last_number",
        {
            **GSM8K,
            "groups_per_step": 32,
            "group_size": 8,
            "rollout.max_response_length": 320,
            "train.learning_rate": 2e-6,
        },
        every=15,
        steps=60,
    ),
    "gsm8k_sft": Task(  # for a model that cannot solve any row before
        "last_number",
        {
            **GSM8K,
            "groups_per_step": 64,
            "group_size": 16,
            "rollout.max_response_length": 256,
            "train.learning_rate": 1e-5,
        },
        every=20,
        steps=100,
        sft={
            "epochs": 4,
            "rows_per_step": 64,
            "data.max_length": 1024,
            "train.learning_rate": 1e-4,
            "train.lr_schedule": "cosine",
            "train.warmup_steps": 20,
        },
    ),
    "sums": Task(
        "last_number",
        {
            "groups_per_step": 64,
            "group_size": 8,
            "data.max_prompt_length": 100,
            "rollout.max_response_length": 24,
            "train.learning_rate": 1e-5,
        },
        every=10,
        steps=100,
        rows=sums,
        cpu={"groups_per_step": 8},
    ),
    "reasoning_gym": Task(  # from the files of reasoning_gym_rows.py
        reasoning_gym_rows.named,
        {
            "groups_per_step": 64,
            "group_size": 8,
            "data.max_prompt_length": 200,
            "rollout.max_response_length": 16,
            "rollout.temperature": 0.7,  # at 1, this small model rarely names anyone
            "train.learning_rate": 1e-5,
        },
        every=10,
        steps=100,
        cpu={"groups_per_step": 8},
    ),
    "countdown": Task(
        countdown.solved,
        {
            "groups_per_step": 64,
            "group_size": 8,
            "data.max_prompt_length": 150,
            "rollout.max_response_length": 48,
            "train.learning_rate": 2e-6,
        },
        every=10,
        steps=100,
        rows=countdown.rows,
    ),
    "tools": Task(
        "last_number",
        {
            "groups_per_step": 32,
            "group_size": 8,
            "rollout.tools": staff.TOOLS,
            "data.system": staff.SYSTEM,
            "rollout.max_turns": 4,
            "rollout.max_response_length": 96,
            "data.max_prompt_length": 800,  # of all turns, with the descriptions of the tools
            "train.learning_rate": 2e-6,
        },
        every=10,
        steps=60,
        rows=staff.rows,
        cpu={"groups_per_step": 2, "group_size": 4},
    ),
}


def read(task: Task, train: Path | None, test: Path | None, limit: int | None) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out ones, at most `limit`."""
    if task.rows is None:
        assert train and test, "this task needs --train and --test"
        made = [
            [json.loads(line) for line in file.read_text().splitlines()] for file in (train, test)
        ]
        return made[0], made[1][:limit]
    rows = list(task.rows(9000, 0))
    held_out = min(1000, len(rows) // 4)
    return rows[held_out:], rows[:held_out][:limit]


def messages(row: Mapping[str, Any], settings: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the prompt of a row as Paceline renders it."""
    system = settings.get("data.system")
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": row[settings.get("data.prompt_key", "prompt")]}]


def examples(rows: Rows, settings: Mapping[str, Any]) -> Rows:
    """Return prompts with the answers of the data set, for supervised fine-tuning."""
    return [
        {"prompt": messages(row, settings), "completion": ANNOTATION.sub("", row["answer"])}
        for row in rows
    ]
