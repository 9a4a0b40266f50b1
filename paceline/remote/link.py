"""The end of a process that runs user code: its tie to its parent, and the connection.

remote/child.py is the parent's end. Imports only the standard library and small modules, because
these processes must start fast.
"""

import atexit
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.remote.descendants import VARIABLE, kill_descendants
from paceline.remote.parent import end_with_parent

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
EXIT_TIMEOUT_S = 2.0


class Link:
    """The connection to the parent."""

    def __init__(self, fd: int) -> None:
        """Take over the socket. Only this process may use it.

        Programs that the user code starts do not inherit it, and a process that it forks closes it:
        code that the model wrote would set its reward.
        """
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        os.register_at_fork(after_in_child=self._forget)

    def reply(self, **message: Any) -> None:
        self.send(json.dumps(message).encode())

    def send(self, line: bytes) -> None:
        """Send a line of JSON."""
        self._socket.sendall(line + b"\n")

    def _forget(self) -> None:
        if (fd := self._socket.detach()) >= 0:  # else a parent has forgotten it
            os.close(fd)

    def watch(self, deliver: Callable[[Any], object]) -> None:
        """Deliver requests from a thread, and None once the parent has disconnected."""
        threading.Thread(target=self._watch, args=(deliver,), daemon=True).start()

    def _watch(self, deliver: Callable[[Any], object]) -> None:
        """Receive requests. Exit soon after the parent disconnects, even if user code hangs."""
        try:
            with self._socket.makefile("rb") as stream:
                while True:
                    deliver(pickle.load(stream))
        except (EOFError, OSError):
            pass
        finally:
            deliver(None)
            time.sleep(EXIT_TIMEOUT_S)
            os.killpg(os.getpgrp(), signal.SIGKILL)


def open_link(fd: int, parent: int, stacks: int) -> Link:
    """Tie this process to its parent and return the connection.

    On SIGUSR1 it writes its stacks to the file `stacks`.
    """
    end_with_parent(parent)
    os.set_inheritable(stacks, False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # Registered first, so that it is called after what the user code has registered.
    atexit.register(kill_descendants, [os.getpid()], [os.environ.get(VARIABLE, "")])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopt orphans, so that the parent finds them
        libc.prctl(PR_SET_DUMPABLE, 0)  # programs of the same user cannot take its descriptors
    return Link(fd)
