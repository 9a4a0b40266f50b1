"""Read back what a tracker has stored, with the tracker's own code where it has some."""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Stored:
    """A run in a tracker: `points` are the values of each metric as (step, value)."""

    settings: dict[str, Any] = field(default_factory=dict)
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    samples: str = ""  # all of them, as the tracker stores them
    summary: str = ""

    def add(self, name: str, step: int, value: float) -> None:
        self.points.setdefault(name, []).append((step, value))


def read_tensorboard(run_dir: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    texts = {
        name: [
            e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{name}/text_summary")
        ]
        for name in ("settings", "samples", "summary")
    }
    (settings,) = texts["settings"]
    stored = Stored(json.loads(settings), {}, "".join(texts["samples"]), "".join(texts["summary"]))
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            stored.add(name, event.step, event.value)
    return stored


def read_wandb(run_dir: Path) -> Stored:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes files after the run has ended
    stored, ids = Stored(), set()
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for data in _log_records(file.read_bytes()):
            record = Record.FromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
                stored.settings |= {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.run.config.update
                }
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            for name, item in items.items():
                value = json.loads(item.value_json)
                if isinstance(value, int | float) and not name.startswith("_"):
                    stored.add(name, record.history.step.num, value)
            for item in record.summary.update:
                stored.summary += f"{item.key or item.nested_key}: {item.value_json}\n"
    assert len(ids) == 1
    for table in run_dir.glob("wandb/offline-run-*/files/media/table/*.json"):
        stored.samples += table.read_text()
    return stored


def _log_records(data: bytes) -> list[bytes]:
    """Return the records of a LevelDB log, whose first block has a header of seven bytes."""
    position, records, part = 7, [], b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(part)
            part = b""
    return records


def read_mlflow(run_dir: Path) -> Stored:
    from mlflow import MlflowClient
    from mlflow.artifacts import load_text

    client = MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'paceline'")
    (run,) = (
        run
        for run in client.search_runs([experiment.experiment_id])
        if run.info.run_name == run_dir.name
    )
    settings = {name: json.loads(value) for name, value in run.data.params.items()}
    uri = run.info.artifact_uri
    samples = [
        load_text(f"{uri}/{file.path}")
        for file in client.list_artifacts(run.info.run_id, "samples")
    ]
    stored = Stored(settings, {}, "".join(samples), load_text(f"{uri}/summary.json"))
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            stored.add(name, metric.step, metric.value)
    return stored


def read_trackio(run_dir: Path) -> Stored:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = (n for n in SQLiteStorage.get_runs("paceline") if n.startswith(run_dir.name))
    settings = SQLiteStorage.get_run_config("paceline", name) or {}
    stored = Stored({k: v for k, v in settings.items() if not k.startswith("_")})
    for row in SQLiteStorage.get_logs("paceline", name):
        for key, value in row.items():
            if key == "samples":
                stored.samples += json.dumps(value)
            elif key.startswith("summary/"):
                stored.summary += f"{key}: {value}\n"
            elif isinstance(value, int | float) and key != "step":
                stored.add(key, row["step"], value)
    return stored


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}
