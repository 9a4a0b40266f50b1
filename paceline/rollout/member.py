"""Member of the fleet: the controller's record of one engine, with its state and load."""

from dataclasses import dataclass
from enum import StrEnum

from paceline.rollout.client import EngineClient
from paceline.rollout.engine import EngineStats


class State(StrEnum):
    STARTING = "starting"  # the process runs but has no weights yet
    LIVE = "live"  # in rotation: has the current weights and gets new prompts
    CATCHING_UP = "catching_up"  # missed a weight sync: finishes its requests, gets no new prompts
    REMOVING = "removing"  # returns its unfinished requests
    DEAD = "dead"


@dataclass(eq=False, slots=True)
class Member:
    name: str
    incarnation: int  # unique; a replacement has the name of the worker it replaces
    engine: EngineClient
    elastic: bool = True  # has no other role, so the run can continue without it
    state: State = State.LIVE
    version: int = 0  # last reported version of its weights
    load: int = 0  # trajectories that generate there or are about to
    reserved: int = 0  # of these, trajectories that have not generated yet
    completions: int = 0  # finished so far
    failures: int = 0  # consecutive failures under this name without a finished completion
    loading: bool = False  # loads new weights and may not respond meanwhile
    stats: EngineStats | None = None  # last reported statistics
    stats_s: float = 0.0  # time of that report
    tokens_per_s: float = 0.0

    @property
    def in_rotation(self) -> bool:
        return self.state is State.LIVE and not self.engine.worker.died.done()
