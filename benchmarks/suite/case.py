"""One benchmark case, run in a separate process with the settings of a spec file.

`python -m benchmarks.suite.case SPEC.json RESULT.json` writes its log to stdout and its metrics to
RESULT.json. The metrics cover the steady state, which begins after the warm-up steps.
"""

import asyncio
import json
import logging
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.forced_lengths import forced_length, forcing_client
from benchmarks.suite.watcher import Watcher, train_watched
from paceline import generation
from paceline.config import RunConfig, load_config
from paceline.errors import PacelineError
from paceline.loop import Metrics
from paceline.types import OnSync

ROOT = Path(__file__).resolve().parents[2]


def steady_metrics(
    config: RunConfig, summary: dict[str, Any], watcher: Watcher, warm_up: int
) -> dict[str, Any]:
    rows = watcher.steps
    begin, end = rows[warm_up - 1]["wall_time_s"], rows[-1]["wall_time_s"]
    steady, seconds = rows[warm_up:], end - begin
    # the last poll happens after the run has ended
    polls = [poll for poll in watcher.polls[:-1] if poll.at_s >= begin]
    busy = summary["rollout_busy_fraction"]
    if len(polls) > 1:
        busy = min(1.0, (polls[-1].busy_s - polls[0].busy_s) / (polls[-1].at_s - polls[0].at_s))
    return {
        "samples_per_s": _total(steady, "rollout/samples") / seconds,
        "tokens_per_s": _total(steady, "rollout/tokens") / seconds,
        "steps_per_s": len(steady) / seconds,
        "sample_age_s": _total(steady, "sample_age_s") / len(steady),
        "staleness_mean": _total(steady, "staleness/mean") / len(steady),
        "staleness_max": summary["staleness_max"],
        "sync_ms": 1000 * summary["sync_latency_s"],
        "rollout_busy": busy,
        "train_busy": min(1.0, _total(steady, "train/busy_s") / seconds),
        "queue_utilization": statistics.fmean(
            [poll.queue_utilization for poll in polls]
            or [row["queue/utilization"] for row in steady]
        ),
        "memory_peak_bytes": summary["memory_peak_bytes"],
        "dropped": rows[-1]["queue/dropped"],
        "steps": summary["steps"],
        "longest_gap_s": max(
            (b["wall_time_s"] - a["wall_time_s"] for a, b in pairwise(rows)), default=0.0
        ),
        "steady_from_s": begin,
        "steady_to_s": end,
        **_time_fractions(config, steady, seconds, busy),
    }


def _time_fractions(
    config: RunConfig, steady: Sequence[Metrics], seconds: float, busy: float
) -> dict[str, float]:
    """Return how trainer and engines spend their time, as fractions of the steady state."""
    wait, train, sync = (
        _total(steady, f"time/{part}_s") / seconds for part in ("wait", "train", "sync")
    )
    paused = sync if config.schedule.on_sync is not OnSync.SWAP and not config.in_place else 0.0
    return {
        "trainer_trains": train,
        "trainer_waits": wait,
        "trainer_syncs": sync,
        "trainer_other": max(0.0, 1 - train - wait - sync),
        "rollout_generates": busy,
        "rollout_paused": min(paused, 1 - busy),
        "rollout_idle": max(0.0, 1 - busy - paused),
    }


def _total(rows: Sequence[Metrics], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)


def main() -> int:
    spec, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.info("case %s", json.dumps(spec))
    if not spec["recipe"]:
        # a model with random weights earns no reward, which the health checks would report
        logging.getLogger("paceline.observe.health").setLevel(logging.ERROR)
        median, cap = spec["median"], spec["cap"]
        client = forcing_client(lambda request: forced_length(request, median, 8 * median, cap))
        mock.patch.object(generation, "EngineClient", client).start()
    watcher = Watcher()
    try:
        config = load_config(
            ROOT / "recipes" / f"{spec['recipe']}.toml" if spec["recipe"] else None,
            spec["settings"],
        )
        summary, pause = asyncio.run(train_watched(config, watcher, spec["pause"]))
    except PacelineError as error:
        logging.error("%s: %s", type(error).__name__, error)
        result.write_text(
            json.dumps({"state": "failed", "reason": f"{type(error).__name__}: {error}"})
        )
        return error.exit_code
    warm_up = min(spec["warm_up"], max(1, len(watcher.steps) // 3))
    metrics = steady_metrics(config, summary, watcher, warm_up) | {
        "max_queue_size": config.max_queue_size,
        "capacity": config.schedule.capacity(config.groups_per_step),
        "max_staleness": config.schedule.max_staleness,
        "steps_planned": config.steps,
        "in_place": config.in_place,
    }
    result.write_text(
        json.dumps({"state": "ok", "metrics": metrics, "pause": asdict(pause) if pause else None})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
