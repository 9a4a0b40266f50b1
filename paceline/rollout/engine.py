"""The protocol of a rollout engine: what makes tokens. `native/` is ours; others adapt to this.

The controller holds one client per engine; the engine itself may live on a thread or in another process.
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
    slots: int = 1  # sequences it can decode at the same time
    kv_used: float = 0.0  # share of its memory for keys and values that is taken


class RolloutEngine(Protocol):
    async def generate(self, request: Request) -> Completion:
        """Generate one sequence. Requests made in one tick of the event loop reach the engine together, and those
        with the same prompt share one prefill."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Give up on these; their `generate` calls return what there is, with `Finish.ABORT`. Unknown ids are ignored."""
        ...

    async def pause(self, mode: OnSync) -> bool:
        """Stop making tokens. drain: once the running sequences have ended. interrupt: at once; their `generate`
        calls return with `Finish.INTERRUPT`. swap: at once, sequences stay where they are. New requests wait."""
        ...

    async def resume(self) -> bool: ...

    async def load_weights(self, weights: Weights) -> None:
        """Take over new weights between two decode steps, completely or not at all. Raises SyncError."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
