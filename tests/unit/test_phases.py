"""Memory of the phases of a worker that alternates between generation and training."""

import pytest

from paceline.training import phases
from paceline.training.phases import GENERATE, MEASURED, TRAIN, Phases


def peaks_of_steps(count: int) -> list[dict[str, float]]:
    measured = Phases()
    found = []
    for _ in range(count):
        measured.enter(TRAIN)
        measured.enter(GENERATE)
        found.append(measured.metrics())
    return found


def test_memory_is_measured_in_first_steps_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_on_gpu", lambda: False)
    monkeypatch.setattr(phases, "_peak", lambda: 7)
    steps = peaks_of_steps(MEASURED + 3)
    assert steps[0] == {"memory/start_bytes": 7, "memory/train_bytes": 7}
    both = {"memory/generate_bytes": 7, "memory/train_bytes": 7}
    assert steps[1:MEASURED] == [both] * (MEASURED - 1)
    assert steps[MEASURED:] == [{}] * 3


def test_memory_is_measured_in_every_step_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_on_gpu", lambda: True)
    monkeypatch.setattr(phases, "_peak", lambda: 7)
    assert all("memory/train_bytes" in step for step in peaks_of_steps(MEASURED + 3))
