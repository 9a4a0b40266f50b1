"""Weight check: it ends a run only if an engine's log-probs of given tokens are wrong."""

import asyncio
from typing import Any

import numpy as np
import pytest

from paceline.errors import MismatchError, WorkerDied
from paceline.types import Batch, Completion, Finish, Group, Prompt, Request, Trajectory, Turn
from paceline.weight_check import ROWS, TOKENS, WeightCheck

VERSION = 3


def group(length: int = 20, size: int = 4) -> Group:
    tokens = np.arange(length, dtype=np.int32)
    made = Completion(tokens, np.zeros(length, np.float32), np.zeros(length, np.int32), Finish.STOP)
    trajectories = (Trajectory((Turn((7, 8), made),), "", 1.0),) * size
    return Group(0, Prompt("0", (7, 8), "", {}), trajectories, 0.0, 0.0)


class Actor:
    """A trainer whose log-prob of a token is minus its number."""

    def start_call(self, role: str, method: str, batch: Batch) -> "asyncio.Future[Any]":
        assert method == "logprobs" and batch.mask.sum() == TOKENS * len(batch.lengths)
        reply = asyncio.get_running_loop().create_future()
        reply.set_result(np.where(batch.mask, -batch.tokens, 0).astype(np.float32))
        return reply


class Engine:
    def __init__(self, error: float = 0.0, correct: int = TOKENS, dies: bool = False) -> None:
        """`error`: of each log-prob. `correct`: tokens of a request before newer weights."""
        self.error, self.correct, self.dies = error, correct, dies
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        if self.dies:
            raise WorkerDied("killed")
        tokens = np.array(request.forced, np.int32)
        versions = np.where(np.arange(len(tokens)) < self.correct, VERSION, VERSION + 1)
        logprobs = (self.error - tokens).astype(np.float32)
        return Completion(tokens, logprobs, versions.astype(np.int32), Finish.LENGTH)


class Member:
    def __init__(self, engine: Engine, version: int = VERSION) -> None:
        self.name, self.engine, self.version = "rollout", engine, version


def check(*members: Member, length: int = 20) -> None:
    class Fleet:
        in_rotation = members

    async def run() -> None:
        parts: Any = Actor(), Fleet()
        groups = [group(length)] * 3
        await WeightCheck(*parts, temperature=0.8, limit=0.02).begin(groups, VERSION)

    asyncio.run(run())


def test_check_gives_parts_of_completions_to_every_engine() -> None:
    engines = Engine(), Engine(0.01)
    check(*map(Member, engines))
    for engine in engines:
        assert len(engine.requests) == ROWS and len({r.id for r in engine.requests}) == ROWS
        assert {len(r.forced) for r in engine.requests} == {TOKENS}
        assert {len(r.prompt) for r in engine.requests} == {2, 10, 14}, "at several positions"


@pytest.mark.parametrize("error", [0.05, np.nan])
def test_check_fails_when_one_engine_differs(error: float) -> None:
    with pytest.raises(MismatchError, match=r"'rollout' .* weights of version 3: .* 64 given"):
        check(Member(Engine()), Member(Engine(error)))


def test_check_ignores_tokens_of_newer_weights() -> None:
    check(Member(Engine(0.05, correct=1)))
    with pytest.raises(MismatchError, match="16 given tokens"):
        check(Member(Engine(0.05, correct=2)))


def test_check_does_nothing_when_completions_are_empty() -> None:
    engine = Engine(0.05)
    check(Member(engine), length=0)
    assert engine.requests == []


def test_check_ignores_engines_that_are_late_or_die() -> None:
    late = Engine(0.05)
    check(Member(late, VERSION - 1), Member(Engine(dies=True)))
    assert late.requests == []
