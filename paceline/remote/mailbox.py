"""Exactly-once, ordered messages over calls that can be lost, duplicated or delayed (Ray).

The caller numbers the messages it pushes and acknowledges those it has received. It pushes one
batch at a time and repeats the call until it gets a reply.
"""

import pickle
import threading
from functools import partial
from typing import Any

from paceline.remote.host import ThreadChannel
from paceline.remote.message import pickled

PULL_S = 1.0  # an empty reply is sent at least this often, as a sign of life


class Mailbox(ThreadChannel):
    """The worker's end: the host's channel, and the methods that the caller calls.

    Messages stay pickled until the host takes them, so that the host imports what they refer to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taken = 0  # messages that were put into the inbox
        self._first = 0  # number of the first message in `_sent`
        self._sent: list[bytes] = []  # by the host, not acknowledged
        self._changed = threading.Condition()

    def push(self, first: int, messages: list[bytes]) -> None:
        """Deliver messages numbered from `first` to the host; skip those it has already."""
        with self._changed:
            for message in messages[max(0, self._taken - first) :]:
                self._taken += 1
                self.inbox.put(message)

    def pull(self, received: int, wait_s: float = PULL_S) -> tuple[int, list[bytes]]:
        """Wait for messages of the host beyond `received`; return them and the first number."""
        with self._changed:
            known = max(0, received - self._first)
            self._first, self._sent = self._first + known, self._sent[known:]
            self._changed.wait_for(lambda: self._sent, wait_s)
            return self._first, list(self._sent)

    def recv(self) -> Any:
        return pickle.loads(super().recv())

    def send(self, message: Any) -> None:
        data = pickled(partial(pickle.dumps, protocol=5), message)
        with self._changed:
            self._sent.append(data)
            self._changed.notify_all()
