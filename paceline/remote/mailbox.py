"""Messages in both directions over calls that may be lost, doubled or late: each arrives once and in order.

The caller numbers what it pushes and says how much it has received; it pushes one batch at a time and calls again until it is answered.
"""

import pickle
import threading
from typing import Any

from paceline.remote.host import ThreadChannel

PULL_S = 1.0  # an empty answer at least this often: a sign of life


class Mailbox(ThreadChannel):
    """The worker's end: a channel for its host, and what the caller calls. Messages stay pickled until the host takes them, so that
    what they refer to is imported by the host, when its turn comes."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = 0  # messages for the host so far
        self._first = 0  # number of the first message in `_sent`
        self._sent: list[bytes] = []  # by the host, not known to have been received
        self._changed = threading.Condition()

    def push(self, first: int, messages: list[bytes]) -> None:
        """Messages for the host, numbered from `first`; those that it has already are skipped."""
        with self._changed:
            for message in messages[max(0, self._taken - first) :]:
                self._taken += 1
                self.inbox.put(message)

    def pull(self, received: int, wait_s: float = PULL_S) -> tuple[int, list[bytes]]:
        """The messages of the host after the first `received`, once there are any, and the number of the first."""
        with self._changed:
            known = max(0, received - self._first)
            self._first, self._sent = self._first + known, self._sent[known:]
            self._changed.wait_for(lambda: self._sent, wait_s)
            return self._first, list(self._sent)

    def recv(self) -> Any:
        return pickle.loads(super().recv())

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        with self._changed:
            self._sent.append(data)
            self._changed.notify_all()
