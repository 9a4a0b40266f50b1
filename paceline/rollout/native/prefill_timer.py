"""Seconds of prefills on a GPU, which the host starts but does not wait for."""

from collections import deque
from types import TracebackType

import torch

from paceline.remote.device_clock import PREFILL, current_activity, current_clock


class PrefillTimer:
    """Context of a prefill on a stream. Its seconds are counted when the GPU has done it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)
        self._begun.record(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ended = torch.cuda.Event(enable_timing=True)
        ended.record(self._stream)
        self._pairs.append((self._begun, ended))

    def settle(self) -> None:
        """Count the prefills that are done, instead of the decode step that waited for them."""
        while self._pairs and self._pairs[0][1].query():
            begun, ended = self._pairs.popleft()
            clock, activity = current_clock(), current_activity()
            if clock and activity:
                clock.move(begun.elapsed_time(ended) / 1e3, activity, PREFILL)
