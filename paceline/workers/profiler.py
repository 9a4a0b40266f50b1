"""Part of a worker that records a torch profile of what its thread computes."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
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

    def stop(self, path: str) -> "Future[bool] | bool":
        """Write the profile, and return whether there was one.

        Writing may take minutes, in which the worker must reply to heartbeats: so on a thread.
        """
        if self._profile is None:
            return False
        recorded, self._profile = self._profile, None
        try:
            recorded.stop()
        except BaseException:
            _recording.release()
            raise
        writer = ThreadPoolExecutor(1, "profile")
        written = writer.submit(_write, recorded, path)
        writer.shutdown(wait=False)
        return written


def _write(recorded: profile, path: str) -> bool:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(path)
    finally:
        _recording.release()
    return True
