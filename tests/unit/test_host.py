"""A worker's host: replies of calls whose results come from another thread."""

import threading
from concurrent.futures import Future

from paceline.remote.host import ThreadChannel, serve
from paceline.remote.message import Call, Reply


class Part:
    def __init__(self) -> None:
        self.written: Future[str] = Future()
        self.release = threading.Event()

    def later(self) -> "Future[str]":
        return self.written

    def compute(self) -> None:
        self.release.wait(30)


def test_reply_of_other_thread_is_sent_while_part_computes() -> None:
    channel, part = ThreadChannel(), Part()
    host = threading.Thread(target=serve, args=(channel, {"part": part}), daemon=True)
    host.start()
    channel.inbox.put(Call(1, "part", "later", ()))
    channel.inbox.put(Call(2, "part", "compute", ()))
    part.written.set_result("files")
    assert channel.outbox.get(timeout=30) == Reply(1, "files")
    part.release.set()
    assert channel.outbox.get(timeout=30) == Reply(2, None)
    channel.inbox.put(None)
    host.join(30)


def test_error_of_other_thread_is_reply() -> None:
    channel, part = ThreadChannel(), Part()
    threading.Thread(target=serve, args=(channel, {"part": part}), daemon=True).start()
    part.written.set_exception(OSError(28, "No space left on device"))
    channel.inbox.put(Call(1, "part", "later", ()))
    assert isinstance(channel.outbox.get(timeout=30).error, OSError)
    channel.inbox.put(None)
