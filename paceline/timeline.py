"""What the controller is doing: the phase of the train task and the stage of every group.

It knows for whom an idle device waits, and what each group went through. It keeps seconds per
combination of phase and stage; a tracer, if there is one, gets every event.
"""

import asyncio
import math
from collections import Counter, defaultdict
from typing import Protocol

# Phases of the train task.
GROUPS, PAUSE, TRAIN, SYNC = "groups", "pause", "train", "sync"
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
# What generation does: a group is generated, or only scored, or none is in flight.
GENERATED, SCORED, NOTHING = "generated", "scored", "nothing"


class Tracer(Protocol):
    def phase(self, name: str, begun: float, ended: float) -> None: ...

    def group(self, kind: str, seq: int, stage: str, begun: float, ended: float) -> None: ...

    def dropped(self, seq: int, reason: str, now: float) -> None: ...


class Timeline:
    def __init__(self, tracer: Tracer | None = None) -> None:
        # By phase and what generation does.
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.wasted_tokens = 0  # of groups that were dropped after they were generated
        self._tracer = tracer
        self._phase, self._phase_begun = GROUPS, math.nan
        self._since = math.nan
        self._groups: dict[tuple[str, int], tuple[str, float]] = {}  # stage, and since when
        self._stages: Counter[str] = Counter()
        self._generation = NOTHING  # what it does, from the stages

    def enter(self, phase: str) -> None:
        """Begin a phase of the train task."""
        now = self.advance()
        if phase == self._phase:
            return
        if self._tracer:
            self._tracer.phase(self._phase, self._phase_begun, now)
        self._phase, self._phase_begun = phase, now

    def group(self, kind: str, seq: int, stage: str | None) -> None:
        """Begin a stage of a group; None: it has left the last one."""
        stages, key = self._stages, (kind, seq)
        now = asyncio.get_running_loop().time() if self._tracer else 0.0
        last, begun = self._groups.pop(key, (None, now))
        if last is not None:
            stages[last] -= 1
            if self._tracer:
                self._tracer.group(kind, seq, last, begun, now)
        if stage is not None:
            self._groups[key] = stage, now
            stages[stage] += 1
        generation = GENERATED if stages[GENERATED] else SCORED if stages[SCORED] else NOTHING
        if generation != self._generation:  # of many groups, few change it
            self.advance()
            self._generation = generation

    def dropped(self, seq: int, reason: str, tokens: int = 0) -> None:
        """End a group that is not trained, with its generated tokens."""
        self.group("group", seq, None)
        self.wasted_tokens += tokens
        if self._tracer:
            self._tracer.dropped(seq, reason, asyncio.get_running_loop().time())

    def end(self) -> None:
        """Give the tracer what has not ended."""
        for kind, seq in list(self._groups):
            self.group(kind, seq, None)
        if self._tracer:
            self._tracer.phase(self._phase, self._phase_begun, self.advance())

    def advance(self) -> float:
        """Count the time until now; return it."""
        now = asyncio.get_running_loop().time()
        if math.isnan(self._since):
            self._since = self._phase_begun = now
        self.seconds[self._phase, self._generation] += now - self._since
        self._since = now
        return now
