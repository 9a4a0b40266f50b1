"""Rollouter: generates all trajectories of a prompt through the environment, then scores them.

Waits for: the engines (one with room for the prompt, then its completions) and the reward. The feed
waits for it while it is paused, the synchronizer while it drains. A group is returned complete, or
an error is raised; a failed trajectory is never a sample with reward 0.
"""

import asyncio
import copy
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from paceline.errors import PacelineError, RewardError, RolloutError, first_error
from paceline.printable import describe_error
from paceline.reward.function import RewardFunctionError, named_rewards
from paceline.reward.reward import Reward
from paceline.rollout.deadlines import Deadlines
from paceline.rollout.environment import AgentLoop, Generate
from paceline.rollout.fleet import Fleet
from paceline.rollout.in_flight import GroupInFlight
from paceline.rollout.member import Member
from paceline.rollout.quarantine import Quarantine, Quarantined
from paceline.rollout.router import EngineAssignment, Router
from paceline.rollout.settings import EPISODE_GENERATIONS
from paceline.types import (
    MAX_REWARD,
    Completion,
    Finish,
    Group,
    OnSync,
    Prompt,
    Request,
    Sampling,
    Trajectory,
)

log = logging.getLogger(__name__)

GREEDY = -1  # trajectory index of the greedy completion, the baseline of some algorithms


class Rollouter:
    def __init__(
        self,
        fleet: Fleet,
        environment: AgentLoop,
        reward: Reward,
        sampling: Sampling,
        *,
        group_size: int,
        min_group_size: int | None = None,
        greedy_baseline: bool = False,
        seed: int,
        on_sync: OnSync,
        generation_timeout: float,
        episode_timeout_s: float | None = None,
        hedge_after_s: float | None = None,
        slots: int | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.changed = fleet.changed
        self._holds: set[str] = set()  # names of the callers that paused it
        self._fleet = fleet
        # Up to `slots` more trajectories wait at the engine, so that no slot is idle.
        self._router = Router(fleet, hedge_after_s, slots and 2 * slots, quarantine)
        fleet.on_change = self._recheck
        self._environment = environment
        self._reward = reward
        self._sampling = sampling
        self._group_size = group_size
        self._may_fail = group_size - (min_group_size or group_size)
        self._greedy_baseline = greedy_baseline
        self._seed = seed
        self._on_sync = on_sync
        self._timeout = generation_timeout
        self._episode_s = episode_timeout_s or EPISODE_GENERATIONS * generation_timeout
        self._ids = itertools.count()
        self._ended: Counter[str] = Counter()  # groups and tokens, shared with the variants
        self._kind = "group"  # for the watcher
        self._made: Counter[int] = Counter()  # tokens of complete trajectories, by group
        # Called with a group's kind and number when it enters a stage, and None when it ends.
        self.watch: Callable[[str, int, str | None], None] = lambda *_: None
        # Current stage of each group, and when it began.
        self._stages: dict[int, tuple[str, float]] = {}
        self._in_flight: dict[int, GroupInFlight] = {}
        self._saved: dict[int, GroupInFlight] = {}  # by the run that this one continues
        self._deadlines = Deadlines()

    def variant(self, temperature: float, group_size: int) -> "Rollouter":
        """Return a rollouter of the same engines and reward that samples in another way.

        Both are paused together, and share the room of the engines.
        """
        other = copy.copy(self)
        other._sampling = replace(self._sampling, temperature=temperature)
        other._group_size = group_size
        other._may_fail, other._greedy_baseline, other._stages = 0, False, {}
        other._in_flight, other._saved = {}, {}
        other._kind, other._made = "evaluation", Counter()
        # Looked up at every call, because the loop sets it later.
        other.watch = lambda *args: self.watch(*args)
        return other

    async def run(self, seq: int, prompt: Prompt) -> Group:
        """Generate and score all trajectories of a prompt. Raises RolloutError or RewardError."""
        saved = self._saved.pop(seq, None)
        # A curriculum may have chosen another prompt for this position.
        progress = saved if saved and saved.uid == prompt.uid else GroupInFlight(prompt.uid)
        self._enter(seq, "generated", "issued")
        self._in_flight[seq] = progress
        unused = "lost_tokens"
        try:
            if progress.scored:
                group = progress.group(seq, prompt, asyncio.get_running_loop().time())
            else:
                group = await self._run(seq, prompt, progress)
            unused = "evaluation_tokens" if self._kind == "evaluation" else ""
            return group
        finally:
            del self._stages[seq], self._in_flight[seq]
            self._ended.update({"group": 1, unused: self._made.pop(seq, 0)})
            self.watch(self._kind, seq, None)

    def in_flight(self) -> dict[int, GroupInFlight]:
        """Return the groups that are not finished, with what the controller knows of them."""
        return {seq: group.copy() for seq, group in (self._saved | self._in_flight).items()}

    def restore(self, groups: Mapping[int, GroupInFlight]) -> None:
        """Continue these groups when they are run, instead of starting them over."""
        self._saved = dict(groups)

    async def _run(self, seq: int, prompt: Prompt, progress: GroupInFlight) -> Group:
        clock = asyncio.get_running_loop().time
        started = clock()
        indices = [*range(self._group_size), *([GREEDY] if self._greedy_baseline else [])]
        assignment = EngineAssignment(self._router, indices, prompt.uid)
        failures: list[RolloutError] = []
        try:
            await self._wait_for_engine(assignment, assignment.assign)
            self.watch(self._kind, seq, "generated")
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._trajectory(assignment, seq, index, prompt, failures, progress)
                    )
                    for index in indices
                ]
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        finally:
            member = assignment.member
            self._recheck(None if assignment.close() else member)
        assignment.succeeded()
        results = [task.result() for task in tasks]
        baseline = results.pop() if self._greedy_baseline else ()
        if len(baseline) > 1:
            raise RolloutError(
                f"prompt {prompt.uid}: an episode has {len(baseline)} trajectories, but the greedy "
                "baseline is the reward of one; use an algorithm without it, for example grpo"
            )
        trajectories = [trajectory for episode in results for trajectory in episode]
        self._enter(seq, "scored by the reward", "scored")
        scored = await self._score(prompt, [*trajectories, *baseline])
        return Group(
            seq,
            prompt,
            scored[: len(trajectories)],
            started,
            clock(),
            scored[-1].total_reward if baseline else None,
        )

    async def _score(
        self, prompt: Prompt, trajectories: list[Trajectory]
    ) -> tuple[Trajectory, ...]:
        where = f"the reward of prompt {prompt.uid!r}"
        try:
            named = [named_rewards(x) for x in await self._reward.score(prompt, trajectories)]
        except RewardFunctionError as e:
            raise RewardError(f"{where} {e}") from e
        except PacelineError:
            raise
        except Exception as e:  # of an object of the user
            raise RewardError(f"{where} raised {describe_error(e)}") from e
        if len(named) != len(trajectories):
            raise RewardError(f"{where} has {len(named)} values for {len(trajectories)} texts")
        if large := [score["reward"] for score in named if abs(score["reward"]) > MAX_REWARD]:
            raise RewardError(f"{where} returned {large[0]:g}; expected at most {MAX_REWARD:g}")
        return tuple(
            trajectory.scored(score.pop("reward"), score)
            for trajectory, score in zip(trajectories, named, strict=True)
        )

    @property
    def finished(self) -> int:
        """Number of groups that have ended, those of its variants and failed ones included."""
        return self._ended["group"]

    @property
    def lost_tokens(self) -> int:
        """Tokens of complete trajectories whose group failed."""
        return self._ended["lost_tokens"]

    @property
    def evaluation_tokens(self) -> int:
        """Tokens that its variants generated."""
        return self._ended["evaluation_tokens"]

    def group_stages(self) -> list[str]:
        """Describe how many groups are in which stage, and since when the oldest is."""
        now, stages = asyncio.get_running_loop().time(), list(self._stages.items())
        counts = Counter(stage for _, (stage, _) in stages)
        oldest = {stage: (now - since, seq) for seq, (stage, since) in reversed(stages)}
        return [
            f"{count} group(s) are being {stage} (group {oldest[stage][1]} for "
            f"{oldest[stage][0]:.0f} s)"
            for stage, count in counts.items()
        ]

    def _enter(self, seq: int, stage: str, name: str) -> None:
        self._stages[seq] = stage, asyncio.get_running_loop().time()
        self.watch(self._kind, seq, name)

    @property
    def paused(self) -> bool:
        return bool(self._holds)

    def paused_by(self, who: str) -> bool:
        return who in self._holds

    async def pause_rollout(self, who: str = "user") -> bool:
        """Admit nothing new, and drain, interrupt or hold running generations as `on_sync` says.

        Idempotent.
        """
        self._holds.add(who)
        await self._fleet.pause(self._on_sync)
        if self.paused:  # otherwise it was resumed before the last generation ended
            self._deadlines.pause()
        return True

    async def resume_rollout(self, who: str = "user") -> bool:
        """Resume what `pause_rollout` paused, unless another caller also paused it. Idempotent."""
        if who not in self._holds:
            return True
        self._holds.remove(who)
        if self._holds:
            return True
        await self._fleet.resume()
        if self._holds:
            return True  # it was paused again meanwhile
        self._deadlines.resume()
        self.changed.notify_all()
        self._recheck()
        return True

    async def _wait_for_engine(
        self, assignment: EngineAssignment, take: Callable[[], bool]
    ) -> None:
        """Wait until `take` finds an engine. The generation timeout does not run meanwhile."""
        await self._router.wait(assignment, lambda: not self.paused and take())
        while self.paused:  # again, between the waker and this task
            await self._router.wait(assignment, lambda: not self.paused and take())

    def _recheck(self, member: Member | None = None) -> None:
        """Let waiting prompts and turns look for an engine: at one with room, or at any."""
        if not self.paused:
            self._router.recheck(member)

    def _leave(self, assignment: EngineAssignment) -> None:
        """Give up a place at the engine, which a waiting prompt or turn may take."""
        if member := assignment.give_up_place():
            self._recheck(member)

    async def _trajectory(
        self,
        assignment: EngineAssignment,
        seq: int,
        index: int,
        prompt: Prompt,
        failures: list[RolloutError],
        progress: GroupInFlight,
    ) -> tuple[Trajectory, ...]:
        """Run one episode; return none if it failed and the group may continue without it."""
        generate = self._generate(assignment, seq, index, prompt, progress)
        try:
            if index not in progress.finished:
                episode = self._environment.run(prompt, generate)
                made = await self._episode(episode, index, prompt)
                self._made[seq] += sum(trajectory.num_tokens for trajectory in made)
                progress.finish(index, made)
            return progress.finished[index]
        except RolloutError as error:
            failures.append(error)
            fatal = isinstance(error, Quarantined) or index == GREEDY
            if len(failures) > self._may_fail or fatal:
                raise
            log.warning("group %d continues without a failed trajectory: %s", seq, error)
            return ()
        finally:
            if assignment.use_reserved(index):  # it did not generate
                self._leave(assignment)

    async def _episode(
        self, episode: Awaitable[Trajectory | tuple[Trajectory, ...]], index: int, prompt: Prompt
    ) -> tuple[Trajectory, ...]:
        try:
            with self._deadlines.within(self._episode_s):
                made = await episode
                return made if isinstance(made, tuple) else (made,)
        except TimeoutError:
            raise RolloutError(
                f"trajectory {index} of prompt {prompt.uid} took longer than "
                f"rollout.episode_timeout_s = {self._episode_s:g} s"
            ) from None

    def _generate(
        self,
        assignment: EngineAssignment,
        seq: int,
        index: int,
        prompt: Prompt,
        progress: GroupInFlight,
    ) -> Generate:
        turns, name = itertools.count(), f"trajectory {index} of prompt {prompt.uid}"
        usual = replace(self._sampling, temperature=0.0) if index == GREEDY else self._sampling

        async def generate(
            context: tuple[int, ...],
            /,
            *,
            max_new_tokens: int | None = None,
            stop: tuple[str, ...] = (),
        ) -> Completion:
            limited = max_new_tokens is not None or stop
            sampling = _limited(usual, max_new_tokens, stop, name) if limited else usual
            number = next(turns)
            seed = _seed(self._seed, seq, index, number)
            call = progress.begin_call(index, number, context)
            completion = call.completion
            left, losses = self._timeout, assignment.losses
            placed = assignment.use_reserved(index)

            def place() -> bool:
                nonlocal placed
                if placed:
                    return assignment.assign()  # else its engine is lost
                placed = assignment.take_place()
                return placed

            try:
                while completion is None or completion.finish is Finish.INTERRUPT:
                    await self._wait_for_engine(assignment, place)
                    request = Request(
                        f"{seq}.{index}.{next(self._ids)}", context, seed, sampling, completion
                    )
                    call.request_id = request.id
                    try:
                        with self._deadlines.within(left) as deadline:
                            completion = await assignment.generate(request)
                    except TimeoutError:
                        raise RolloutError(
                            f"{name} took longer than rollout.generation_timeout = "
                            f"{self._timeout:g} s"
                        ) from None
                    if completion.finish is Finish.INTERRUPT:
                        call.completion, left = completion, deadline.seconds_left
                    if assignment.losses > losses:  # an engine was lost: the timeout starts over
                        left, losses = self._timeout, assignment.losses
            finally:
                if placed:  # while the environment replies, others generate
                    self._leave(assignment)
            if completion.finish is Finish.ABORT:
                raise RolloutError(f"{name} was aborted after {len(completion)} tokens")
            call.completion = completion
            return completion

        return generate


def _limited(
    usual: Sampling, max_new_tokens: int | None, stop: tuple[str, ...], name: str
) -> Sampling:
    """Return how to sample one turn of a trajectory with this name."""
    length = usual.max_new_tokens
    if max_new_tokens is not None:
        length = min(max_new_tokens, length)
    if length < 1:
        raise RolloutError(
            f"{name}: generate() got max_new_tokens = {max_new_tokens}: expected 1 or more. End "
            "the episode instead, or leave it out for rollout.max_response_length"
        )
    return replace(usual, max_new_tokens=length, stop=(*usual.stop, *stop))


def _seed(*parts: int) -> int:
    """Return a seed per (run, group, trajectory, turn), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest())
