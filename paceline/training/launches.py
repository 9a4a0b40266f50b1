"""Limit on how far the host runs ahead of the GPU.

A GPU accepts about a thousand kernels ahead of time. While that queue is full, launches of every
thread wait in the driver for the next free place. So a train step that fills it delays the engine
beside it, although the engine's stream has priority.
"""

from collections import deque

import torch

LAYERS = 3  # enough work for the GPU while the host launches the next layer


class LaunchLimit:
    """Makes the host wait after each layer until at most LAYERS of them are queued."""

    def __init__(self) -> None:
        self._queued: deque[torch.cuda.Event] = deque()

    def layer_launched(self) -> None:
        done = torch.cuda.Event(blocking=True)  # the thread sleeps while it waits
        done.record()
        self._queued.append(done)
        if len(self._queued) > LAYERS:
            self._queued.popleft().synchronize()
