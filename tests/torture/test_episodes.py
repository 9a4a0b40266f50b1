"""Episodes of many turns in the real loop, in virtual time: interrupted, killed, hung, with several
agents. A fake engine samples from the seed of a request alone, as real engines do with the same
weights, so that episodes are the same however often they are interrupted."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.data.prompts import DataSettings
from paceline.environment.conversation import Limits
from paceline.environment.protocol import Message, Reply
from paceline.errors import RolloutError
from paceline.rollout.environment import CustomEnvironment, Generate, open_environment
from paceline.rollout.in_flight_files import read_in_flight
from paceline.types import Finish, Group, Prompt, Request, Trajectory, Turn
from tests.chat_templates import tokenizer_of
from tests.fakes import FakeEngine, World
from tests.fault_report import Fault
from tests.torture.test_in_flight import SAVED_STEP, killed, resumed
from tests.torture.test_loop import MODES, random_world, staleness_in_data
from tests.virtual import run_virtual

TURNS = 4
THOUGHT = tokenizer_of("thinking").encode("<think>six</think>", add_special_tokens=False)
END = tokenizer_of("thinking").convert_tokens_to_ids("<|im_end|>")


class SeededEngine(FakeEngine):
    """Engine whose completions depend on the seed of the request alone; half of them reason."""

    def _length(self, request: Request) -> int:
        return len(self._completion(request))

    def _token(self, request: Request, position: int) -> int:
        return self._completion(request)[position]

    def _completion(self, request: Request) -> list[int]:
        numbers = random.Random(request.seed)
        thought = THOUGHT if numbers.random() < 0.5 else []
        said = [numbers.randint(20, 200) for _ in range(numbers.randint(1, 6))]
        return [*thought, *said, END][: request.sampling.max_new_tokens]


class Counting:
    """Environment with a state that every reply shows, and calls that take seconds."""

    made = closed = 0
    world: World
    synced = 0  # calls during which an engine got new weights

    def __init__(self) -> None:
        Counting.made += 1
        self.seen: list[int] = []

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": "count"}]

    async def step(self, message: Message) -> Reply:
        self.seen.append(len(message["content"]))
        before = self.world.engines[0].version
        await asyncio.sleep(self.world.rng.expovariate(0.2))
        Counting.synced += self.world.engines[0].version > before
        return Reply(f"seen {self.seen}", 0.25, done=len(self.seen) == TURNS)

    async def close(self) -> None:
        Counting.closed += 1


def conversation(make: Any = Counting) -> Any:
    limits = Limits(TURNS, 10_000, timeout_s=1e9)
    data = DataSettings(path="rows.jsonl")
    return open_environment(make, tokenizer_of("thinking"), data, limits)


class TwoAgents:
    """Agent loop of two agents, the second of which sees what the first said."""

    async def run(self, prompt: Prompt, generate: Generate) -> tuple[Trajectory, ...]:
        first = await generate(prompt.tokens)
        given = (7, *first.tokens.tolist(), 8)
        second = await generate(given)
        retried = await generate((9, *given))
        return (
            Trajectory((Turn(prompt.tokens, first),), "", agent="proposer"),
            Trajectory((Turn(given, second), Turn((9, *given), retried, 0.5, True)), "", agent="s"),
        )


ENVIRONMENTS = {
    "conversation": conversation,
    "agents": lambda: CustomEnvironment("TwoAgents", TwoAgents()),
}


def world_of(seed: int, mode: str, environment: str) -> World:
    world = random_world(seed, MODES[mode])
    world.make_engine, world.environment = SeededEngine, ENVIRONMENTS[environment]()
    world.group_size = 2
    Counting.world = world
    return world


def said(groups: list[Group]) -> dict[int, Any]:
    """Return all that the trajectories of each group consist of, apart from versions."""
    return {
        group.seq: [
            (
                trajectory.agent,
                trajectory.end,
                [
                    (turn.prompt, turn.completion.tokens.tolist(), turn.reward, turn.restarts)
                    for turn in trajectory.turns
                ],
            )
            for trajectory in group.trajectories
        ]
        for group in groups
    }


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("mode", ["async swap", "async interrupt", "one step off"])
def test_episodes_are_the_same_when_weights_change_in_them(mode: str, environment: str) -> None:
    mixed = 0
    Counting.made = Counting.closed = Counting.synced = 0
    for seed in range(4):
        worlds = [world_of(seed, each, environment) for each in ("sync", mode)]
        for world in worlds:
            Counting.world = world
            run_virtual(world.build().run())
        still, moving = (world.observer.groups for world in worlds)
        assert said(still) == said(moving), f"seed {seed}"
        for trajectory in (t for group in moving for t in group.trajectories):
            versions = [v for turn in trajectory.turns for v in turn.completion.versions.tolist()]
            assert versions == sorted(versions), "a later token has an older version"
            later = [turn.completion.versions for turn in trajectory.turns[1:]]
            mixed += sum(bool(len(set(each.tolist())) > 1) for each in later)
    assert mixed or mode == "one step off", "no later turn was interrupted"
    if environment == "conversation":
        assert Counting.synced, "no sync happened during a call of an environment"
        assert Counting.made == Counting.closed, "an episode was started over or not closed"


@pytest.mark.parametrize("mode", ["async swap", "async interrupt"])
def test_every_token_of_all_turns_has_version_that_sampled_it(mode: str) -> None:
    for seed in range(6):
        world = world_of(seed, mode, "conversation")
        world.make_engine = FakeEngine  # the value of a token is its version
        run_virtual(world.build().run())
        assert max(staleness_in_data(world)) <= world.schedule.max_staleness
        assert any(len(t.turns) > 1 for group in world.observer.groups for t in group.trajectories)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("mode", ["async swap", "async interrupt"])
def test_killed_run_continues_in_middle_of_episode(
    mode: str, environment: str, tmp_path: Path
) -> None:
    whole_turns = split = 0
    for seed in range(5):
        first, second = (world_of(seed, mode, environment) for _ in range(2))
        Counting.world = first
        state = killed(first, tmp_path / str(seed))
        saved = read_in_flight(tmp_path / str(seed) / str(SAVED_STEP))
        calls = [c for group in saved.values() for calls in group.calls.values() for c in calls]
        parts = [call.completion for call in calls if call.completion is not None]
        unfinished = [len(part) for part in parts if part.finish is Finish.INTERRUPT]
        whole_turns += len(parts) - len(unfinished)
        Counting.world = second
        resumed(second, state, saved)
        if mode == "async swap":  # otherwise, requests are resumed after each interruption, too
            # A completed turn is replayed into a new environment, without an engine.
            assert sum(engine.resumed for engine in second.engines) == sum(unfinished)
        expected, found = said(first.observer.groups), said(second.observer.groups)
        assert found == {seq: expected[seq] for seq in found}, f"seed {seed}"
        groups = second.observer.groups
        split += sum(len(t.rows) - 1 for group in groups for t in group.trajectories)
    assert whole_turns and split


class Hanging(Counting):
    """Environment of which every fifth hangs for ever in its second turn."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = self.made % 5 == 0

    async def step(self, message: Message) -> Reply:
        if self.hangs and self.seen:
            await asyncio.Event().wait()
        return await super().step(message)


@pytest.mark.fault("B8", "one episode of a group hangs in its environment")
def test_group_closes_without_episode_that_hangs(fault: Fault) -> None:
    Counting.made = Counting.closed = 0
    world = world_of(3, "async swap", "conversation")
    world.environment, world.group_size, world.min_group_size = conversation(Hanging), 4, 3
    world.episode_timeout_s = 500.0
    run_virtual(world.build().run())
    fault.fired()
    sizes = [len(group.trajectories) for group in world.observer.groups]
    assert set(sizes) == {3, 4} and len(sizes) == 6 * world.groups_per_step
    assert Counting.made == Counting.closed
    fault.recovered()


def test_ledger_counts_group_of_agents_once() -> None:
    world = world_of(1, "async swap", "agents")
    world.group_size, world.min_group_size = 3, 2
    run_virtual(world.build().run())
    groups = 6 * world.groups_per_step
    assert world.ledger.trained_count == groups == len(world.observer.groups)
    for batch in world.trainer.batches:
        # Three episodes of a proposer with one row and a solver with two.
        assert batch.num_rows == 9 * world.groups_per_step and batch.trajectories is not None
        assert len(set(batch.trajectories.tolist())) == 6 * world.groups_per_step
        assert len(set(batch.groups.tolist())) == 2 * world.groups_per_step


def test_greedy_baseline_rejects_several_agents() -> None:
    world = world_of(1, "sync", "agents")
    world.greedy_baseline = True
    with pytest.raises(RolloutError, match="has 2 trajectories, but the greedy baseline"):
        run_virtual(world.build().run())


@pytest.mark.parametrize("limit", [0, -1])
def test_trajectory_fails_when_agent_asks_for_no_tokens(limit: int) -> None:
    class OutOfBudget:
        async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
            completion = await generate(prompt.tokens, max_new_tokens=limit)
            return Trajectory((Turn(prompt.tokens, completion),), "")

    async def scenario() -> Group:
        world = World(schedule=MODES["async swap"], make_engine=SeededEngine)
        world.environment = CustomEnvironment("OutOfBudget", OutOfBudget())
        world.build()
        return await world.rollouter.run(0, Prompt("p0", (1,), "", {}))

    with pytest.raises(RolloutError, match=f"max_new_tokens = {limit}: expected 1 or more"):
        run_virtual(scenario())
