"""The host runs at most a few layers ahead of the GPU while an engine works beside training."""

from typing import Any

import pytest

from paceline.training.launches import LAYERS, LaunchLimit


class FakeEvents:
    """Stands in for torch.cuda.Event: numbers of recorded events and of those waited for."""

    def __init__(self) -> None:
        self.recorded, self.awaited = 0, list[int]()

    def __call__(self, **_: Any) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, events: FakeEvents) -> None:
        self._events = events

    def record(self) -> None:
        self._events.recorded += 1
        self.number = self._events.recorded

    def synchronize(self) -> None:
        self._events.awaited.append(self.number)


def test_host_is_at_most_limit_of_layers_ahead_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    events = FakeEvents()
    monkeypatch.setattr("torch.cuda.Event", events)
    limit = LaunchLimit()
    for _ in range(LAYERS):
        limit.layer_launched()
    assert events.awaited == []
    for _ in range(5):
        limit.layer_launched()
    assert events.awaited == [1, 2, 3, 4, 5]
