"""Part of a worker that records a torch profile of what its thread computes."""

import logging
import threading
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)

_recording = threading.Lock()  # torch has one profiler per process, which workers on threads share


class TorchProfiler:
    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        if self._profile or not _recording.acquire(blocking=False):
            log.warning("another worker of this process records a torch profile; this one does not")
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, path: str) -> bool:
        """Write the profile, and return whether there was one."""
        if self._profile is None:
            return False
        try:
            self._profile.stop()
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(path)
        finally:
            self._profile = None
            _recording.release()
        return True
