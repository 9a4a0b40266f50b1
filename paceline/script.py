"""The workers of a recipe in a plain Python script: start them, call their roles, and wait for the
results or not.

    with Workers(load_config("split")) as workers:
        actor = workers.actor.update(batch, step, blocking=False)  # at the same time
        critic = workers.critic.update(batch, step, blocking=False)
        metrics = actor.get() | critic.get()
        workers.sync_weights(step + 1)
        completions = workers.rollout.generate(prompts)

Waits for: the results that the script asks for. The loop of `paceline train` makes the same calls
with `await` instead of `get`.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.config import RunConfig
from paceline.data.chat import stop_token_ids
from paceline.data.tiny import resolve_model
from paceline.model.loading import load_generation_config, load_tokenizer
from paceline.remote.worker import Worker
from paceline.rollout.client import EngineClient
from paceline.sync.weights import WeightTransport
from paceline.types import Completion, Request, Role, Sampling
from paceline.workers.cluster import Cluster
from paceline.workers.engines import engine_workers
from paceline.workers.layout import choose_settings
from paceline.workers.pools import close_workers, open_cluster, plan_workers, start_workers
from paceline.workers.transport import open_transport

T = TypeVar("T")


class PendingResult(Generic[T]):
    """The return value of a call with `blocking=False`."""

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def get(self, timeout: float | None = None) -> T:
        """Wait for the result and return it.

        Raise the error of the call, or TimeoutError after `timeout` seconds.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()


class RoleProxy:
    """The methods of one role, each with `blocking` as an extra argument."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]], submit: "_Submit") -> None:
        self._call, self._submit = call, submit

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, blocking: bool = True) -> Any:
            return self._submit(self._call(method, *args), blocking)

        return call


class Workers:
    """The workers of a recipe, by role: `workers.actor`, `workers.critic`, `workers.ref`,
    `workers.reward`, `workers.rollout`. A role of several ranks answers once for all."""

    def __init__(self, config: RunConfig, log_folder: Path | None = None) -> None:
        self._config, self._logs = config, log_folder or Path(config.run_dir) / "logs"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="workers", daemon=True)
        self._workers: dict[Role, list[Worker]] = {}
        self._engines: list[EngineClient] = []
        self._transport: WeightTransport | None = None
        self._cluster: Cluster | None = None
        self._numbers = itertools.count()

    def __enter__(self) -> "Workers":
        self._thread.start()
        try:
            self._submit(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._submit(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __getattr__(self, role: str) -> RoleProxy:
        workers = self._workers.get(role) if role in list(Role) else None  # type: ignore[call-overload]
        if not workers:
            present = ", ".join(role for role, found in self._workers.items() if found)
            raise AttributeError(f"this recipe has no {role!r}; it has {present}")
        if role == Role.ROLLOUT:
            return RoleProxy(self._call_engines, self._submit)

        def call(method: str, *args: Any) -> Coroutine[Any, Any, Any]:
            return workers[0].call(role, method, *args)

        return RoleProxy(call, self._submit)

    def sync_weights(self, version: int, blocking: bool = True) -> Any:
        """Bring the actor's weights to all engines, as this version."""
        return self._submit(self._sync(version), blocking)

    async def _call_engines(self, method: str, *args: Any) -> Any:
        """Call `generate`, which divides the prompts between the engines, or a method of each."""
        if method == "generate":
            return await self._generate(*args)
        return await asyncio.gather(*(getattr(engine, method)(*args) for engine in self._engines))

    async def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None, seed: int = 0
    ) -> list[Completion]:
        """Generate one completion per prompt. Their seeds are `seed`, `seed` + 1 and so on."""
        chosen = sampling or self._sampling
        requests = [
            Request(f"script.{next(self._numbers)}", tuple(map(int, prompt)), seed + n, chosen)
            for n, prompt in enumerate(prompts)
        ]
        turns = itertools.cycle(self._engines)
        return await asyncio.gather(
            *(engine.generate(request) for engine, request in zip(turns, requests, strict=False))
        )

    async def _sync(self, version: int) -> None:
        if self._transport is None:
            self._transport = await open_transport(self._config, self._workers)
        weights = await self._transport.publish(version)
        await asyncio.gather(*(engine.load_weights(weights) for engine in self._engines))

    async def _start(self) -> None:
        config = self._config
        model_path = resolve_model(config.model, config.data.task)
        config = self._config = await choose_settings(config, model_path)
        ends = stop_token_ids(load_tokenizer(model_path), load_generation_config(model_path))
        self._sampling = config.rollout.sampling(ends)
        self._cluster = await open_cluster(config, model_path, self._logs)
        plans = plan_workers(config, self._cluster.nodes())
        self._workers = await start_workers(self._cluster, plans, config.start_timeout_s)
        engines = engine_workers(config, plans, self._workers[Role.ROLLOUT])
        self._engines = [EngineClient(worker) for worker in engines]

    async def _close(self) -> None:
        await close_workers(self._workers)
        if self._cluster is not None:
            await self._cluster.close()

    def _submit(self, coroutine: Coroutine[Any, Any, T], blocking: bool = True) -> Any:
        result = PendingResult(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        return result.get() if blocking else result


_Submit = Callable[[Coroutine[Any, Any, Any], bool], Any]
