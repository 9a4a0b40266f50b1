"""The workers of a recipe in a plain Python script: start them, call their roles, and wait for the
results or not.

    with Workers(load_config("recipes/split.toml")) as workers:
        actor = workers.actor.update(batch, step, blocking=False)  # at the same time
        critic = workers.critic.update(batch, step, blocking=False)
        metrics = actor.get() | critic.get()

Waits for: the results that the script asks for. The loop of `paceline train` makes the same calls
with `await` instead of `get`.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.config import RunConfig
from paceline.data.tiny import resolve_model
from paceline.remote.worker import Worker
from paceline.types import Role
from paceline.workers.cluster import Cluster
from paceline.workers.pools import close_workers, open_cluster, plan_workers, start_workers

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

    def __init__(self, call: Callable[..., "Future[Any]"]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, blocking: bool = True) -> Any:
            result = PendingResult(self._call(method, *args))
            return result.get() if blocking else result

        return call


class Workers:
    """The workers of a recipe, by role: `workers.actor`, `workers.critic`, `workers.ref`,
    `workers.rollout`."""

    def __init__(self, config: RunConfig, log_folder: Path | None = None) -> None:
        self._config, self._logs = config, log_folder or Path(config.run_dir) / "logs"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="workers", daemon=True)
        self._workers: dict[Role, list[Worker]] = {}
        self._cluster: Cluster | None = None

    def __enter__(self) -> "Workers":
        self._thread.start()
        try:
            self._wait(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __getattr__(self, role: str) -> RoleProxy:
        workers = self._workers.get(role) if role in list(Role) else None  # type: ignore[call-overload]
        if not workers:
            present = ", ".join(role for role, found in self._workers.items() if found)
            raise AttributeError(f"this recipe has no {role!r}; it has {present}")

        def call(method: str, *args: Any) -> "Future[Any]":
            return asyncio.run_coroutine_threadsafe(
                workers[0].call(role, method, *args), self._loop
            )

        return RoleProxy(call)

    async def _start(self) -> None:
        model_path = resolve_model(self._config.model, self._config.data.task)
        self._cluster = await open_cluster(self._config, model_path, self._logs)
        self._workers = await start_workers(
            self._cluster, plan_workers(self._config, self._cluster.nodes())
        )

    async def _close(self) -> None:
        await close_workers(self._workers)
        if self._cluster is not None:
            await self._cluster.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
