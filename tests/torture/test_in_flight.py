"""The real loop in virtual time, killed and resumed with the groups in flight of a checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.generation import Generation
from paceline.queue.ledger import Ledger, LedgerState
from paceline.rollout.environment import Generate
from paceline.rollout.in_flight import GroupInFlight, fresh_enough
from paceline.rollout.in_flight_files import FOLDER, read_in_flight
from paceline.types import Completion, Finish, Prompt, Trajectory, Turn
from tests.fakes import World
from tests.torture.test_loop import MODES, random_world, staleness_in_data
from tests.virtual import run_virtual

SAVED_STEP = 3


def killed(world: World, folder: Path) -> LedgerState:
    """Run a world with a checkpoint of step 3; return its ledger. What follows is lost."""
    states: dict[int, LedgerState] = {}

    async def write(step: int, groups: dict[int, GroupInFlight], copied: Any) -> None:
        target = folder / str(step)
        target.mkdir(parents=True)
        async with generation.writing_in_flight(groups, step, target):
            if copied:
                copied()  # training and generation continue beside the write

    def save(step: int, copied: Callable[[], None] | None) -> Any:
        states[step] = world.ledger.state()
        return write(step, generation.in_flight(world.queue), copied)

    world.save_every, world.save = SAVED_STEP, save
    loop = world.build()
    generation = Generation({}, world.fleet, world.rollouter, world.reward)
    run_virtual(loop.run())
    return states[SAVED_STEP]


def resumed(world: World, state: LedgerState, groups: dict[int, GroupInFlight]) -> None:
    loop = world.build(Ledger(state=state))
    for engine in world.engines:
        engine.version = SAVED_STEP
    world.rollouter.restore(groups)
    run_virtual(loop.run(SAVED_STEP))


def twins(seed: int, mode: str) -> tuple[World, World]:
    first, second = random_world(seed, MODES[mode]), random_world(seed + 1000, MODES[mode])
    second.groups_per_step, second.group_size = first.groups_per_step, first.group_size
    return first, second


@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_continues_groups_in_flight_within_bound(mode: str, tmp_path: Path) -> None:
    kept = {"scored": 0, "finished": 0, "calls": 0}
    for seed in range(10):
        first, second = twins(seed, mode)
        state = killed(first, tmp_path / str(seed))
        saved = read_in_flight(tmp_path / str(seed) / str(SAVED_STEP))
        bound = first.schedule.max_staleness
        groups = fresh_enough(saved, state.outstanding, SAVED_STEP, first.groups_per_step, bound)
        assert groups == saved, "admission already keeps the bound"
        resumed(second, state, groups)
        before = first.observer.groups[: SAVED_STEP * first.groups_per_step]
        seqs = [group.seq for group in before + second.observer.groups]
        assert seqs == list(range(6 * first.groups_per_step)), f"seed {seed}"
        assert max(staleness_in_data(second)) <= bound
        trained = {group.seq: group for group in second.observer.groups}
        for seq, group in read_in_flight(tmp_path / str(seed) / str(SAVED_STEP)).items():
            for name in kept:
                kept[name] += bool(getattr(group, name))
            if seq in trained:
                check_continued(group, trained[seq].trajectories)
    assert all(kept.values()) or mode in ("sync", "one step off")


def check_continued(saved: GroupInFlight, trajectories: tuple[Trajectory, ...]) -> None:
    parts = {i: calls[0].completion for i, calls in saved.calls.items() if calls}
    parts |= {i: each[0].turns[0].completion for i, each in saved.finished.items()}
    if saved.scored:
        parts = {i: t.turns[0].completion for i, t in enumerate(saved.scored.trajectories)}
    for index, part in parts.items():
        assert part is not None
        whole = trajectories[index].turns[0].completion
        assert whole.versions[: len(part)].tolist() == part.versions.tolist()
        assert len(whole) == len(part) or part.finish is Finish.INTERRUPT


def test_engine_gets_saved_tokens_once_and_samples_none_of_them(tmp_path: Path) -> None:
    saved_tokens = 0
    for seed in range(10):
        first, second = twins(seed, "async swap")
        state = killed(first, tmp_path / str(seed))
        groups = read_in_flight(tmp_path / str(seed) / str(SAVED_STEP))
        calls = [c for g in groups.values() for calls in g.calls.values() for c in calls]
        parts = [call.completion for call in calls if call.completion is not None]
        unfinished = [len(part) for part in parts if part.finish is Finish.INTERRUPT]
        resumed(second, state, groups)
        assert sum(engine.resumed for engine in second.engines) == sum(unfinished)
        saved_tokens += sum(unfinished)
    assert saved_tokens


def test_group_of_another_prompt_is_generated_again(tmp_path: Path) -> None:
    """A curriculum may choose another prompt for the position of a group."""
    first, second = twins(0, "async swap")
    state = killed(first, tmp_path)
    saved = read_in_flight(tmp_path / str(SAVED_STEP))
    resumed(second, state, {seq: replace(group, uid="other") for seq, group in saved.items()})
    assert saved and not any(engine.resumed for engine in second.engines)


def made(versions: list[int]) -> Completion:
    tokens = np.array(versions, np.int32)
    return Completion(tokens, tokens.astype(np.float32), tokens, Finish.INTERRUPT)


@pytest.mark.parametrize(
    ("partials", "versions"),
    [({"r": [1, 1, 2]}, [1, 1]), ({"r": [1], "r+": [1, 1, 1]}, [1, 1, 1]), ({"r": [2]}, None)],
    ids=["newer tokens", "hedged", "only newer tokens"],
)
def test_group_is_saved_with_tokens_of_its_version(
    partials: dict[str, list[int]], versions: list[int] | None
) -> None:
    group = GroupInFlight("p")
    group.begin_call(0, 0, (1,)).request_id = "r"
    saved = group.up_to(1, {name: made(found) for name, found in partials.items()})
    found = [call.completion for call in saved.calls[0]]
    assert [each.versions.tolist() for each in found if each] == ([versions] if versions else [])


def test_stale_trajectory_is_generated_again(tmp_path: Path) -> None:
    dropped = 0
    for seed in range(8):
        first, second = twins(seed, "async swap")
        state = killed(first, tmp_path / str(seed))
        saved = read_in_flight(tmp_path / str(seed) / str(SAVED_STEP))
        second.schedule = MODES["one step off"]  # a lower bound
        per_step = first.groups_per_step
        groups = fresh_enough(saved, state.outstanding, SAVED_STEP, per_step, 1)
        dropped += sum(g.num_tokens for g in saved.values())
        dropped -= sum(g.num_tokens for g in groups.values())
        resumed(second, state, groups)
        assert max(staleness_in_data(second)) <= 1
        assert second.ledger.trained_count == 6 * per_step and not second.ledger.dropped
    assert dropped


class TwoTurns:
    """Agent loop whose second turn depends on a tool."""

    def __init__(self, tool: int) -> None:
        self._tool = tool

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        first = await generate(prompt.tokens)
        told = (*prompt.tokens, *first.tokens.tolist(), self._tool)
        second = await generate(told)
        turns = (Turn(prompt.tokens, first), Turn((self._tool,), second))
        return Trajectory(turns, "")


@pytest.mark.parametrize("same", [True, False])
def test_turns_are_continued_only_in_same_context(same: bool, tmp_path: Path) -> None:
    second_turns = 0
    for seed in range(8):
        first, second = twins(seed, "async swap")
        first.environment, second.environment = TwoTurns(7), TwoTurns(7 if same else 8)
        state = killed(first, tmp_path / str(seed))
        folder = tmp_path / str(seed) / str(SAVED_STEP)
        resumed(second, state, read_in_flight(folder))
        trained = {group.seq: group for group in second.observer.groups}
        for seq, group in read_in_flight(folder).items():
            for index, calls in group.calls.items():
                whole = trained[seq].trajectories[index].turns if seq in trained else ()
                for number, (turn, call) in enumerate(zip(whole, calls, strict=False)):
                    assert call.completion is not None
                    second_turns += number
                    begun = turn.completion.versions[: len(call.completion)].tolist()
                    if same or number == 0:
                        assert begun == call.completion.versions.tolist()
                    else:
                        assert min(begun) >= SAVED_STEP
    assert second_turns


@pytest.mark.parametrize("name", ["groups.json", "tokens.safetensors"])
@pytest.mark.parametrize("damage", ["delete", "cut", "swap"])
def test_damaged_file_of_groups_in_flight_is_rejected(
    name: str, damage: str, tmp_path: Path
) -> None:
    first, _ = twins(3, "async swap")
    killed(first, tmp_path)
    folder = tmp_path / str(SAVED_STEP)
    assert read_in_flight(folder)
    path = folder / FOLDER / name
    if damage == "delete":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:  # whole, but of another checkpoint
        path.write_bytes((tmp_path / "6" / FOLDER / name).read_bytes())
    with pytest.raises(CheckpointError, match="the groups in in_flight cannot be read"):
        read_in_flight(folder)
