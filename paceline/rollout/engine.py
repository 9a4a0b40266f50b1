"""Protocol of a rollout engine, which generates completions.

`native/` is the built-in engine; adapters such as `vllm.py` implement the same protocol. The
controller has one client per engine; the engine runs on a thread or in another process.
"""

from dataclasses import dataclass
from typing import Protocol

from paceline.sync.weights import Weights
from paceline.types import Completion, OnSync, Request


@dataclass(frozen=True, slots=True)
class EngineStats:
    version: int
    running: int  # sequences being decoded
    waiting: int  # sequences without a slot
    tokens: int  # sampled since start
    busy_s: float  # seconds spent computing since start
    paused: bool
    slots: int = 1  # maximum number of sequences decoded concurrently
    kv_used: float = 0.0  # fraction of the KV cache in use
    age_s: float = 0.0  # seconds since start, at the time of this report
    tokens_prefilled: int = 0  # since start; the native engine counts them
    tokens_reused: int = 0  # not prefilled, because an earlier turn left them in the KV cache


class RolloutEngine(Protocol):
    async def generate(self, request: Request) -> Completion:
        """Generate one sequence.

        Requests made in one tick of the event loop reach the engine together, and requests with the
        same prompt share one prefill.
        """
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests; their `generate` calls return the tokens so far with `Finish.ABORT`.

        Unknown IDs are ignored.
        """
        ...

    async def pause(self, mode: OnSync) -> bool:
        """Pause generation; new requests wait.

        drain: pause once the running sequences have finished. interrupt: pause at once; their
        `generate` calls return with `Finish.INTERRUPT`. swap: pause at once and keep the sequences.
        """
        ...

    async def resume(self) -> bool: ...

    async def load_weights(self, weights: Weights) -> None:
        """Load new weights between two decode steps, completely or not at all. Raises SyncError."""
        ...

    async def partials(self) -> list[tuple[str, Completion]]:
        """Return the tokens so far of all requests, which continue."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
