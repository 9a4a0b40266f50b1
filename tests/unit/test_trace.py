"""Trace of a run, in the format that Perfetto reads."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.observe.trace import TraceWriter, convert, write_trace
from tests.device_times import assert_valid_trace


class Reporting:
    """A worker that has two events to report, of which one is inside the other."""

    def __init__(self, begun: float) -> None:
        self._events = [("prefill", begun + 0.1, 0.2, 0), ("decode/8", begun, 1.0, 0)]
        self._events += [("decode/8", begun + 0.999999, 0.5, 0)]  # by the mapping of clocks

    def take_events(self) -> Iterator[tuple[str, float, float, int]]:
        events, self._events = self._events, []
        return iter(events)


def traced(folder: Path) -> Path:
    workers = [("rollout", Reporting(10.0))]
    writer = TraceWriter(folder, lambda: workers)  # type: ignore[arg-type, return-value]

    for step in (1, 2, 3):
        begun = 10.0 + step
        for seq in (2 * step, 2 * step + 1):
            writer.group("group", seq, "generated", begun, begun + 0.4)
            writer.group("group", seq, "queued", begun + 0.4, begun + 0.9)
        writer.phase("train", begun, begun + 0.9)
        writer.step_done(step, begun + 0.95)
    writer.dropped(6, "stale", 13.9)
    writer.close()
    return folder


def test_trace_is_valid_and_names_its_tracks(tmp_path: Path) -> None:
    write_trace(traced(tmp_path), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert_valid_trace(trace)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names >= {"controller", "train task", "groups", "lane 1", "lane 2", "rollout", "worker"}
    slices = [event["name"] for event in trace["traceEvents"]]
    assert {"group 7", "generated", "queued", "prefill", "decode/8", "dropped: stale"} <= {*slices}


def test_trace_has_only_requested_steps(tmp_path: Path) -> None:
    trace = convert(traced(tmp_path), "2:2")
    names = {event["name"] for event in trace["traceEvents"]}
    assert_valid_trace(trace)
    assert "group 4" in names and not {"group 2", "group 6"} & names


@pytest.mark.parametrize("steps", ["a", "1-2", "9:10", ":3"])
def test_unknown_steps_are_rejected(steps: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps"):
        convert(traced(tmp_path), steps)


def test_error_names_output_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output .*no/trace\.json cannot be written"):
        write_trace(traced(tmp_path), tmp_path / "no" / "trace.json")


def test_error_says_how_to_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace=true"):
        convert(tmp_path)
