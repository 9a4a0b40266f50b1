"""A worker in a Ray actor: what the controller sends to it and receives from it.

With remote/mailbox.py, messages are numbered in both directions and repeated until they are
acknowledged, so a lost, duplicated or reordered call takes effect once and in order. A worker that
sends nothing for SILENCE_S counts as dead, because Ray does not report suspended processes.
"""

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from paceline.errors import WorkerDied
from paceline.remote.group import Rank
from paceline.remote.mailbox import PULL_S
from paceline.remote.worker import Build

log = logging.getLogger(__name__)

SILENCE_S = 30.0
RETRY_S = 0.05  # after a call that Ray could not deliver
# Ray's text if the machine of a worker replies that its process no longer listens. Ray itself
# declares the workers of a killed node dead after more than 10 s.
REFUSED = "Connection refused"


class RayWorker(Rank):
    """A worker in a Ray actor: its host runs on a thread, and Ray carries the messages."""

    def __init__(
        self,
        name: str,
        node: str,
        host: str,
        actor: Any,
        log_path: Path,
    ) -> None:
        super().__init__(name, log_path)
        self.node, self.host, self._actor = node, host, actor
        self._outbox: list[Any] = []
        self._sent = 0  # number of messages sent
        self._more = asyncio.Event()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, build: Build, args: tuple[Any, ...]) -> None:
        self.send((build, args))
        self._tasks = [
            self._loop.create_task(self._guarded(work)) for work in (self._push, self._pull)
        ]

    async def address(self) -> tuple[str, int, int]:
        """Return host, port and descriptor of a socket that listens in the worker."""
        return await self._retried("address", self.host)

    def send(self, message: Any) -> None:
        self._outbox.append(message)
        self._more.set()

    async def _push(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            batch, self._outbox = self._outbox, []
            # Pickled here, so that the worker imports what they refer to after its environment is
            # set.
            await self._retried(
                "push", self._sent, [pickle.dumps(message, protocol=5) for message in batch]
            )
            self._sent += len(batch)

    async def _pull(self) -> None:
        received = printed = 0
        with self._log_path.open("ab") as output:
            while True:
                first, messages, text = await self._retried("pull", received, printed)
                printed += output.write(text)
                output.flush()
                for number, message in enumerate(messages, first):
                    if number >= received:
                        received = number + 1
                        self._take(pickle.loads(message))

    def _take(self, message: Any) -> None:
        if message is None:
            if not self._end.done():
                self._end.set_result(None)
        elif isinstance(message, BaseException):
            self._dead(message)
        else:
            self._receive(message)

    async def _retried(self, method: str, *args: Any) -> Any:
        """Call a method of the actor until there is a reply; all of them may be repeated."""
        while True:
            try:
                # Its start has a separate timeout: loading libraries can block all of its threads.
                async with asyncio.timeout(PULL_S + SILENCE_S if not self.starting else None):
                    return await getattr(self._actor, method).remote(*args)
            except ActorUnavailableError as error:
                if REFUSED in str(error):
                    raise
                log.info(
                    "worker %r: a lost call is sent again: %s",
                    self.name,
                    str(error).splitlines()[0],
                )
                await asyncio.sleep(RETRY_S)

    async def _guarded(self, work: Any) -> None:
        try:
            await work()
        except TimeoutError:
            self._unresponsive()
        except RayError as error:
            self._dead(error)
        except Exception as error:  # a message cannot be unpickled, or the log cannot be written
            self._dead(error)
            self.kill()

    def _unresponsive(self) -> None:
        if not self._closing:
            self.fence(
                WorkerDied(
                    f"worker {self.name!r} on node {self.node} did not respond for "
                    f"{SILENCE_S:g} s{self.last_lines()}"
                )
            )
            self.kill()

    def _exit_details(self) -> str:
        return f" on node {self.node}{self.last_lines()}"

    @property
    def title(self) -> str:
        return f"worker {self.name!r} on node {self.node}"

    def ask_stacks(self) -> Callable[[], str]:
        with contextlib.suppress(RayError):
            reply = self._actor.stacks.remote()
            return lambda: _reply(reply)
        return str

    def kill(self) -> None:
        ray.kill(self._actor)

    async def close(self) -> None:
        self._closing = True
        if self._tasks and not self.died.done():
            self.send(None)
            await asyncio.wait(
                {self._end, *self._tasks}, timeout=5, return_when=asyncio.FIRST_COMPLETED
            )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RayError):
            self.kill()


def _reply(reply: Any) -> str:
    """Return the result of a call of an actor, or nothing as long as there is none."""
    try:
        return str(ray.get(reply, timeout=0))
    except RayError:
        return ""
