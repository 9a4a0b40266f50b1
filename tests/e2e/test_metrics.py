"""The table of metrics: every name that a run writes is in it, and every name in it is written."""

import asyncio
import re
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.line_file import intact_rows
from paceline.observe.metric_names import METRICS, MetricName, markdown
from paceline.run import train
from paceline.supervised.config import load_sft_config
from paceline.supervised.run import fine_tune
from tests.models import random_model

TESTS = Path(__file__).parents[1]
SMALL = [
    "steps=3",
    "groups_per_step=2",
    "group_size=2",
    "data.task=copy:3",
    "data.limit=256",
    "rollout.max_response_length=8",
    "placement.threads=1",
    "data.max_prompt_length=32",
]
RUNS = {
    "hybrid sync with evaluations": [
        "algorithm.kl_coef=0.01",
        "evaluation.task=copy:3",
        "evaluation.limit=2",
        "evaluation.every=1",
        f"reward.function={TESTS}/rewards.py:in_parts",
    ],
    "fully async": [
        "placement.overlap=true",
        "schedule.max_staleness=2",
        "schedule.sync_every=2",  # so that the second step has stale tokens in any case
        "algorithm.correction=truncate",
    ],
    "a critic and an environment": [
        *("algorithm.name=ppo", "train.offload=true"),
        f"rollout.environment={TESTS.parent}/examples/tool_environment.py:Lookup",
    ],
    "two agents": [
        f"rollout.environment={TESTS.parent}/examples/two_agents.py:ProposeAndSolve",
    ],
    "a teacher": ["algorithm.name=distill"],
}
SUPERVISED = [
    *("epochs=1", "rows_per_step=8", "data.task=copy:3", "data.limit=24", "data.max_length=32"),
    *("placement.threads=1", "validation.rows=4", "validation.every=1"),
]
# These need several ranks, where tests/hybrid.py reads it, and a GPU.
OTHER_RUNS = {"memory/rank_{n}_{phase}_bytes", "train/flop_utilization"}


@pytest.fixture(scope="module")
def written(model: str, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of all metrics that short runs of each kind write."""
    folder = tmp_path_factory.mktemp("runs")
    teacher = random_model(folder / "model", seed=1)
    for name, settings in RUNS.items():
        chosen = [f"model={model}", f"run_dir={folder / name}", *SMALL, *settings]
        chosen += [f"algorithm.teacher={teacher}"] if name == "a teacher" else []
        asyncio.run(train(load_config(None, chosen)))
    chosen = [f"model={model}", f"run_dir={folder / 'supervised'}", *SUPERVISED]
    asyncio.run(fine_tune(load_sft_config(None, chosen)))
    files = folder.glob("*/metrics.jsonl")
    return {name for file in files for row in intact_rows(file) for name in row} - {"step"}


def find_metric(name: str) -> MetricName | None:
    """Return the entry of a metric: the one with this name, or the first that matches."""

    def matches(metric: MetricName) -> bool:
        parts = re.split(r"\{\w+\}", metric.name)
        return re.fullmatch(".+".join(map(re.escape, parts)), name) is not None

    exact = (metric for metric in METRICS if metric.name == name)
    return next(exact, next(filter(matches, METRICS), None))


def test_every_metric_of_a_run_is_in_the_table(written: set[str]) -> None:
    assert {name for name in written if find_metric(name) is None} == set()


def test_every_metric_in_the_table_is_written(written: set[str]) -> None:
    found = {metric.name for name in written if (metric := find_metric(name))}
    assert {metric.name for metric in METRICS} - found == OTHER_RUNS


def test_page_of_metrics_is_up_to_date() -> None:
    page = (TESTS.parent / "docs" / "metrics.md").read_text()
    assert page == markdown(), "run: paceline metrics --markdown > docs/metrics.md"
