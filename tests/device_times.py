"""Checks of the device-time ledger and of traces."""

from collections import defaultdict
from typing import Any

import pytest

from paceline.observe.device_time import PARTS


def assert_device_time_adds_up(found: dict[str, float], tolerance: float = 0.01) -> None:
    """Check that the parts sum to wall time x devices, and that none is negative."""
    parts = [found[f"{name}_s"] for name in PARTS]
    expected = found["wall_s"] * found["devices"]
    assert min(parts) >= -1e-9
    assert sum(parts) == pytest.approx(found["total_s"], rel=1e-6)
    assert sum(parts) == pytest.approx(expected, rel=tolerance)
    assert 0 < found["speed_of_light"] <= 1 + tolerance


def assert_valid_trace(trace: dict[str, Any]) -> None:
    """Check a trace against Chrome's trace event format, and that slices of a track nest."""
    named, slices = set(), defaultdict(list)
    for event in trace["traceEvents"]:
        track = event["pid"], event["tid"]
        assert isinstance(event["name"], str) and all(isinstance(n, int) for n in track)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            named.add(track)
        else:
            assert event["ph"] in ("X", "i") and event["ts"] >= 0
            assert event["ph"] == "i" or event["dur"] >= 0
            slices[track].append((event["ts"], event["ts"] + event.get("dur", 0)))
    assert slices and slices.keys() | {(pid, 0) for pid, _ in slices} <= named
    for track, spans in slices.items():
        open_until: list[int] = []
        for begun, ended in spans:  # in the order of the file
            while open_until and open_until[-1] <= begun:
                open_until.pop()
            assert not open_until or ended <= open_until[-1], f"{track}: slices overlap"
            open_until.append(ended)
