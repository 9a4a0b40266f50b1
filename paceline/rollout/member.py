"""One engine of the fleet, as the controller sees it: what it may be given, and what it is doing."""

from dataclasses import dataclass
from enum import StrEnum

from paceline.rollout.client import EngineClient
from paceline.rollout.engine import EngineStats


class State(StrEnum):
    STARTING = "starting"  # its process runs, its weights are not there yet
    LIVE = "live"  # in rotation: it has the current weights and takes new work
    CATCHING_UP = "catching_up"  # it missed a hand-over: it finishes what it has and catches up
    REMOVING = "removing"  # it hands back what it has
    DEAD = "dead"


@dataclass(eq=False, slots=True)
class Member:
    name: str
    incarnation: int  # a worker that is replaced keeps its name; this tells the two apart
    engine: EngineClient
    elastic: bool = True  # plays no other role, so that the run can go on without it
    state: State = State.LIVE
    version: int = 0  # of its weights, as far as it has said
    load: int = 0  # attempts that are on it
    answers: int = 0  # it has finished
    failures: int = 0  # deaths under this name, one after the other, without an answer in between
    loading: bool = False  # new weights, during which it answers nobody
    stats: EngineStats | None = None  # what it said last, and when
    heard_s: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def in_rotation(self) -> bool:
        return self.state is State.LIVE and not self.engine.worker.died.done()
