"""Rows of the library `datasets`, which this environment has, as data of the public API."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import paceline
from paceline.data.hub import load_hub_dataset
from paceline.errors import DataError
from tests.models import random_model

ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(4)]


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": random_model(tmp_path / "model"),
        "run_dir": str(tmp_path / "run"),
        "display": False,
        "groups_per_step": 2,
        "group_size": 2,
        "rollout.max_response_length": 4,
        "placement.threads": 1,
    }


@pytest.mark.parametrize("streams", [False, True])
def test_train_accepts_dataset(small: dict[str, Any], streams: bool) -> None:
    rows: Any = Dataset.from_list(ROWS)
    rows = rows.to_iterable_dataset() if streams else rows
    run = paceline.train(data=rows, reward=lambda completion, row: 0.5, steps=2, **small)
    assert run.summary["ledger"]["trained"] == 4


def test_hub_dataset_has_rows_of_split(tmp_path: Path) -> None:
    """The library reads a directory like a repository of the hub."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "test.jsonl").write_text(json.dumps(ROWS[0]))
    assert list(load_hub_dataset(str(folder))) == ROWS
    assert len(list(load_hub_dataset(f"{folder}:test"))) == 1


def test_unknown_hub_dataset_is_error(small: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="neither a file nor a task"):
        paceline.train(data="no-such-owner/no-such-data", reward="exact", **small)
