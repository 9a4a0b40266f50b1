"""Client of an engine in a worker, used by the controller.

Requests of one event-loop tick are sent as one message, so an engine starts a wave of groups
together, independent of timing.
"""

import asyncio
from functools import partial

from paceline.errors import RolloutError
from paceline.notifier import Notifier
from paceline.remote.worker import Worker, mark_seen
from paceline.rollout.engine import EngineStats
from paceline.sync.weights import Weights
from paceline.types import Completion, OnSync, Request, Role


class EngineClient:
    """A RolloutEngine over a worker that hosts a `RolloutService`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._running: dict[str, asyncio.Future[Completion]] = {}
        self._accepted: set[str] = set()  # running requests that the engine has confirmed
        self._outbox: list[Request] = []
        self._open = True
        self._pauses = 0  # number of pause() calls
        self._changed = Notifier()
        worker.listen(Role.ROLLOUT, self._finished)
        worker.died.add_done_callback(self._worker_died)

    async def generate(self, request: Request) -> Completion:
        while not self._open and not self.worker.died.done():
            await self._changed.wait()
        if self.worker.died.done():
            self.worker.died.result()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._running[request.id] = future
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._accepted.discard(request.id)
            if self._running.pop(request.id, None) and not self.worker.died.done():
                mark_seen(self.worker.start_call(Role.ROLLOUT, "abort", [request.id]))
            raise

    def accepted(self, request_id: str) -> bool:
        """Return whether the engine has confirmed a request that it has not finished."""
        return request_id in self._accepted

    async def abort(self, request_ids: list[str]) -> None:
        self._flush()
        await self.worker.call(Role.ROLLOUT, "abort", request_ids)

    async def pause(self, mode: OnSync) -> bool:
        self._open = False
        self._pauses += 1
        self._flush()
        if mode is OnSync.SWAP:
            await self.worker.call(Role.ROLLOUT, "pause")
            return True
        if mode is OnSync.INTERRUPT:
            await self.worker.call(Role.ROLLOUT, "interrupt")
        while self._running and not self._open:
            await self._changed.wait()
            if self.worker.died.done():
                self.worker.died.result()
        return True

    async def resume(self) -> bool:
        pauses = self._pauses
        await self.worker.call(Role.ROLLOUT, "resume")
        if pauses == self._pauses:  # otherwise a later pause() is in effect
            self._open = True
            self._changed.notify_all()
        return True

    async def load_weights(self, weights: Weights) -> None:
        self._flush()
        await self.worker.call(Role.ROLLOUT, "load_weights", weights)

    async def partials(self) -> list[tuple[str, Completion]]:
        return await self.worker.call(Role.ROLLOUT, "partials")

    async def stats(self) -> EngineStats:
        return await self.worker.call(Role.ROLLOUT, "stats")

    async def close(self) -> None:
        await self.worker.close()

    def _flush(self) -> None:
        if self._outbox and not self.worker.died.done():
            requests, self._outbox = self._outbox, []
            self.worker.start_call(Role.ROLLOUT, "submit", requests).add_done_callback(
                partial(self._submitted, requests)
            )

    def _submitted(
        self, requests: list[Request], reply: "asyncio.Future[list[tuple[str, RolloutError]]]"
    ) -> None:
        """Fail the requests that the engine rejected, or all of them if the call failed."""
        if reply.cancelled():
            return  # the run is over
        failure = reply.exception()
        for request_id, error in (
            [(request.id, failure) for request in requests] if failure else reply.result()
        ):
            future = self._running.pop(request_id, None)
            if future and not future.done():
                future.set_exception(error)
        if failure is None:
            self._accepted |= self._running.keys() & {request.id for request in requests}
        self._changed.notify_all()

    def _finished(self, completions: list[tuple[str, Completion]]) -> None:
        for request_id, completion in completions:
            self._accepted.discard(request_id)
            future = self._running.pop(request_id, None)
            if future and not future.done():
                future.set_result(completion)
        self._changed.notify_all()

    def _worker_died(self, died: "asyncio.Future[None]") -> None:
        error = died.exception()
        if error is None:
            return
        for future in self._running.values():
            if not future.done():
                future.set_exception(error)
        self._running.clear()
        self._changed.notify_all()
