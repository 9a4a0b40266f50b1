"""A worker's host: replies of other threads, and replies that cannot be pickled."""

import pickle
import threading
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any

import pytest

from paceline.remote.host import PipeChannel, ThreadChannel, serve
from paceline.remote.mailbox import Mailbox
from paceline.remote.message import Call, Deferred, Reply


class Part:
    def __init__(self) -> None:
        self.written: Future[str] = Future()
        self.release = threading.Event()

    def later(self) -> "Future[str]":
        return self.written

    def compute(self) -> None:
        self.release.wait(120)


def test_reply_of_other_thread_is_sent_while_part_computes() -> None:
    channel, part = ThreadChannel(), Part()
    host = threading.Thread(target=serve, args=(channel, {"part": part}), daemon=True)
    host.start()
    channel.inbox.put(Call(1, "part", "later", ()))
    channel.inbox.put(Call(2, "part", "compute", ()))
    part.written.set_result("files")
    assert channel.outbox.get(timeout=120) == Reply(1, "files")
    part.release.set()
    assert channel.outbox.get(timeout=120) == Reply(2, None)
    channel.inbox.put(None)
    host.join(120)


def test_error_of_other_thread_is_reply() -> None:
    channel, part = ThreadChannel(), Part()
    threading.Thread(target=serve, args=(channel, {"part": part}), daemon=True).start()
    part.written.set_exception(OSError(28, "No space left on device"))
    channel.inbox.put(Call(1, "part", "later", ()))
    assert isinstance(channel.outbox.get(timeout=120).error, OSError)
    channel.inbox.put(None)


class Locked:
    """A value that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class LockedPart:
    def at_once(self) -> Locked:
        return Locked()

    def deferred(self) -> Deferred:
        return Deferred(lambda: True, Locked)

    def of_other_thread(self) -> "Future[Locked]":
        done: Future[Locked] = Future()
        done.set_result(Locked())
        return done

    def add(self, a: int, b: int) -> int:
        return a + b


@pytest.mark.parametrize("method", ["at_once", "deferred", "of_other_thread"])
def test_reply_is_error_with_method_and_type_when_value_cannot_be_pickled(method: str) -> None:
    mailbox = Mailbox()
    host = threading.Thread(target=serve, args=(mailbox, {"part": LockedPart()}), daemon=True)
    host.start()
    mailbox.push(0, [pickle.dumps(Call(1, "part", method, ()))])
    [failed] = _pulled(mailbox, 0)
    assert failed.id == 1
    with pytest.raises(TypeError, match=rf"part\.{method} returned a tests\S+\.Locked, which"):
        raise failed.error
    mailbox.push(1, [pickle.dumps(Call(2, "part", "add", (1, 2)))])  # the worker continues
    assert _pulled(mailbox, 1) == [Reply(2, 3)]
    mailbox.push(2, [pickle.dumps(None)])
    host.join(30)


class Unreachable:
    """A value whose pickling needs a file that is gone."""

    def __reduce__(self) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/gone")


class UnreachablePart:
    def at_once(self) -> Unreachable:
        return Unreachable()

    def of_other_thread(self) -> "Future[Unreachable]":
        done: Future[Unreachable] = Future()
        done.set_result(Unreachable())
        return done


@pytest.mark.parametrize("method", ["at_once", "of_other_thread"])
@pytest.mark.parametrize("kind", ["pipe", "mailbox"])
def test_reply_is_error_when_pickling_raises_os_error(kind: str, method: str) -> None:
    controller, worker = Pipe()
    channel = PipeChannel(worker) if kind == "pipe" else Mailbox()
    host = threading.Thread(target=serve, args=(channel, {"part": UnreachablePart()}), daemon=True)
    host.start()
    call = Call(1, "part", method, ())
    if isinstance(channel, Mailbox):
        channel.push(0, [pickle.dumps(call)])
        [failed] = _pulled(channel, 0)
        channel.push(1, [pickle.dumps(None)])
    else:
        controller.send(call)
        assert controller.poll(30)
        failed = controller.recv()
        controller.send(None)
    with pytest.raises(
        TypeError, match=r"Unreachable, which cannot be pickled: FileNotFound.*gone"
    ):
        raise failed.error
    host.join(30)


def _pulled(mailbox: Mailbox, received: int) -> list[Any]:
    return [pickle.loads(message) for message in mailbox.pull(received, wait_s=10)[1]]
