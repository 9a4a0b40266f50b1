"""Recorder: metrics as plain JSON lines, and a summary of all steps that does not keep them."""

import errno
import json
import math
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.line_file import LineFile
from paceline.observe.recorder import Recorder
from paceline.observe.samples import Samples
from paceline.observe.sinks import Sinks
from paceline.rollout.engine import EngineStats


def recorder(folder: Path, length: int = 0, step: int = 0) -> Recorder:
    return Recorder(folder, length, Samples(folder, 0, step, str), first_step=step)


def metrics(step: int, **more: float) -> dict[str, float]:
    numbers = {
        "sample_age_s": 0.5 * step,
        "staleness/mean": 0.25 * step,
        "staleness/max": float(step % 3),
        "queue/utilization": 0.5,
    }
    return {
        "reward/mean": step / 10,
        "rollout/samples": 8.0,
        "rollout/tokens": 80.0,
        "train/busy_s": 0.01,
        **numbers,
        **more,
    }


def summary(recorder: Recorder) -> dict[str, Any]:
    return recorder.summary(sync_s=[0.1, 0.3], ledger={}, memory_peak_bytes=1)


def test_summary_of_resumed_run_has_rewards_of_all_steps_and_rates_of_this_run(
    tmp_path: Path,
) -> None:
    first = recorder(tmp_path)
    for step in range(1, 11):
        first.step_done(step, metrics(step), [])
    length = first.length
    first.step_done(11, metrics(99), [])  # after the checkpoint, so it is trained again
    first.close()
    second = recorder(tmp_path, length, 10)
    for step in range(11, 21):
        second.step_done(step, metrics(step, **{"memory/train_bytes": 10.0 * (30 - step)}), [])
    second.engines_polled([EngineStats(1, 0, 0, 0, 1e9, False)], 0.25)
    found = summary(second)
    second.close()
    assert (found["steps"], found["steps_this_run"], found["reward_first"]) == (20, 10, 0.1)
    assert found["reward_last"] == pytest.approx(np.mean([1.9, 2.0]))
    assert found["mean_sample_age_s"] == pytest.approx(
        np.mean([0.5 * step for step in range(11, 21)])
    )
    staleness = np.mean([0.25 * step for step in range(11, 21)])
    assert found["staleness_mean"] == pytest.approx(staleness)
    assert found["staleness_max"] == 2
    assert found["samples_per_s"] * found["wall_s"] == pytest.approx(80)
    assert found["tokens_per_s"] * found["wall_s"] == pytest.approx(800)
    assert found["memory_phases"] == {"train": 190}
    assert found["queue_utilization"] == 0.25
    assert found["rollout_busy_fraction"] == 1.0
    assert found["sync_latency_s"] == pytest.approx(0.2)


def test_recorder_closes_its_sinks_when_metrics_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: LineFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Recorded(Sinks):
        closed = False

        def close(self) -> None:
            self.closed = True

    sinks = Recorded()
    opened = Recorder(tmp_path, 0, Samples(tmp_path, 0, 0, str), sinks=sinks)
    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "close", fail)
        with pytest.raises(OSError, match="No space left"):
            opened.close()
    assert sinks.closed
    opened.close()


def test_summary_has_kl_to_teacher_of_all_steps_when_run_is_resumed(tmp_path: Path) -> None:
    for first in (0, 10):
        path = tmp_path / "metrics.jsonl"
        found = recorder(tmp_path, path.stat().st_size if first else 0, first)
        for step in range(first + 1, first + 11):
            found.step_done(step, metrics(step, **{"distill/kl": 1 / step}), [])
        last = summary(found)
        found.close()
    assert last["distill_kl_first"] == 1.0
    assert last["distill_kl_last"] == pytest.approx((1 / 19 + 1 / 20) / 2)


def test_summary_exists_when_no_step_was_trained(tmp_path: Path) -> None:
    found = summary(recorder(tmp_path))
    assert (
        found["steps"],
        found["reward_first"],
        found["mean_sample_age_s"],
        found["queue_utilization"],
    ) == (0, None, 0.0, 0.0)


@pytest.mark.parametrize("checksum", [True, False])
def test_summary_counts_steps_when_lines_of_metrics_are_damaged(
    checksum: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = recorder(tmp_path)
    for step in range(1, 6):
        first.step_done(step, metrics(step), [])
    first.close()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if checksum:
        lines[2] = lines[2].replace("0.3", "9.3")
    else:  # as earlier versions wrote them
        rows = [{"step": n, "reward/mean": n / 10} for n in range(1, 6)]
        lines = [json.dumps(row) + "\n" for row in rows]
        lines[2] = lines[2].replace("0.3", '"3"')
    path.write_text("".join(lines))
    second = recorder(tmp_path, path.stat().st_size, 5)
    second.step_done(6, metrics(6, **{"reward/mean": math.inf}), [])
    found = summary(second)
    second.close()
    assert (found["steps"], found["steps_this_run"], found["reward_first"]) == (6, 1, 0.1)
    assert ("line 3 is damaged" in caplog.text) == checksum
    assert summary(recorder(tmp_path, path.stat().st_size, 6))["steps"] == 6


def test_metrics_have_null_when_number_is_not_finite(tmp_path: Path) -> None:
    found = recorder(tmp_path)
    found.step_done(1, metrics(1, **{"train/grad_norm": math.nan, "train/ratio_max": math.inf}), [])
    found.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row["train/grad_norm"] is None and row["train/ratio_max"] is None
    assert row["sample_age_s"] == 0.5


def test_recorder_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    found = recorder(tmp_path)
    many = {f"train/metric_{number}": 1.0 / (number + 1) for number in range(40)}
    tracemalloc.start()
    try:
        for step in range(100):
            found.step_done(step, metrics(step, **many), [])
        before = tracemalloc.get_traced_memory()[0]
        for step in range(100, 500):
            found.step_done(step, metrics(step, **many), [])
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        found.close()
    assert growth / 400 < 100, "bytes per step"


def test_recorder_passes_final_stats_to_display(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    class Observer:
        def step_done(self, *_: Any) -> None: ...

        def engines_polled(self, engines: Sequence[EngineStats], queue_utilization: float) -> None:
            seen.append((sum(engine.tokens for engine in engines), queue_utilization))

    found = Recorder(tmp_path, 0, Samples(tmp_path, 0, 0, str), Observer())
    found.engines_polled([EngineStats(1, 0, 0, 5, 1.0, False)], 0.5)
    found.record_final_stats([EngineStats(1, 0, 0, 9, 1.0, False)])
    assert seen == [(5, 0.5), (9, 0.5)] and summary(found)["queue_utilization"] == 0.5
    found.close()
