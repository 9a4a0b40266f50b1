"""The part of a Ray worker that runs in the Ray actor: a host on a thread, and its mailbox.

It does not import Ray, and nothing heavy before its environment is set. Every method may be called
twice with the same arguments, because Ray can deliver a call twice or lose its reply.
"""

import gc
import importlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO

from paceline.printable import log_to_stderr
from paceline.remote.host import build_and_serve
from paceline.remote.mailbox import Mailbox
from paceline.remote.message import portable
from paceline.remote.stacks import current_stacks

log = logging.getLogger(__name__)

TEXT_BYTES = 1 << 20  # of output in one reply


class RayHost:
    """The actor. Ray calls its methods on its own threads."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        gc.disable()  # for imports, as in host.py; the host enables it
        os.environ.update(environment)
        self._text = _redirect_output()
        log_to_stderr()
        # The first line of the worker's log, for users who look for its process.
        sys.stdout.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        sys.stdout.flush()
        self._mailbox = Mailbox()
        self._listening: socket.socket | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="host", daemon=True).start()

    def address(self, host: str) -> tuple[str, int, int]:
        """Return host, port and descriptor of a listening socket, for a store."""
        with self._lock:
            self._listening = self._listening or socket.create_server((host, 0))
        return (*self._listening.getsockname()[:2], self._listening.fileno())

    def load(self, module: str) -> None:
        """Import a module that the first message needs, before that message is known."""
        importlib.import_module(module)

    def push(self, first: int, messages: list[bytes]) -> None:
        self._mailbox.push(first, messages)

    def pull(self, received: int, printed: int) -> tuple[int, list[bytes], bytes]:
        """Return messages beyond `received`, and output beyond the first `printed` bytes."""
        first, messages = self._mailbox.pull(received)
        return first, messages, os.pread(self._text.fileno(), TEXT_BYTES, printed)

    def stacks(self) -> str:
        """Return the stacks of this process. A blocked host does not keep Ray's other threads."""
        return current_stacks()

    def _run(self) -> None:
        mailbox = self._mailbox
        try:
            build_and_serve(mailbox)
            mailbox.send(None)
        except BaseException as error:
            log.exception("the worker failed")
            mailbox.send(portable(error))


def _redirect_output() -> IO[bytes]:
    """Redirect the output of this process to an unnamed file, which `pull` reads."""
    text = tempfile.TemporaryFile()  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in (1, 2):
        os.dup2(text.fileno(), descriptor)
    return text


def smallest_gpu() -> int:
    """Return the memory of this machine's smallest GPU in bytes, or 0 if it is unknown."""
    return int(_smallest("memory.total")) << 20


def oldest_gpu() -> int:
    """Return the lowest major compute capability of this machine's GPUs, or 0 if it is unknown."""
    return int(_smallest("compute_cap"))


def _smallest(field: str) -> float:
    asked = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return min(map(float, subprocess.check_output(asked, text=True, timeout=30).split()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0
