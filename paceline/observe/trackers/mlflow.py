"""MLflow: the server of MLFLOW_TRACKING_URI, or MLflow's database in the current directory. The
experiment is that of MLFLOW_EXPERIMENT_NAME."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from paceline.observe.trackers import COLUMNS, PROJECT, TrackedRun, flat

BATCH = 100  # parameters; MLflow accepts no more at once
MAX_PARAMETER = 500  # characters; what every version of MLflow accepts


class MlflowRun:
    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self.run_id = client, run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        batch = [Metric(metric_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=batch)

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = {"columns": COLUMNS, "data": rows}
        self._client.log_dict(self.run_id, table, f"samples/step_{step:08d}.json")

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._client.log_dict(self.run_id, dict(summary), "summary.json")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if finished else "FAILED")


def metric_name(name: str) -> str:
    """Return the name in MLflow, which has no "@": evaluation/pass_at_4."""
    return name.replace("@", "_at_")


def open_run(run: TrackedRun) -> MlflowRun:
    client = MlflowClient()
    if run.resumed:
        client.update_run(run.run_id, status="RUNNING")
        return MlflowRun(client, run.run_id)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    run_id = client.create_run(experiment, run_name=run.name).info.run_id
    values = [
        Param(key, json.dumps(value)[:MAX_PARAMETER]) for key, value in flat(run.config).items()
    ]
    for first in range(0, len(values), BATCH):
        client.log_batch(run_id, params=values[first : first + BATCH])
    return MlflowRun(client, run_id)
