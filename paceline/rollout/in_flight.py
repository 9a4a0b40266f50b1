"""Groups in flight: what is generated of each, so that a checkpoint can keep it.

A resumed run replays the agent loop of an unfinished trajectory: a call of `generate` returns or
continues the saved completion if its context is the same. Seeds depend on the position in the
stream of prompts, so the rest of a completion is what it would have been without the interruption.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

import numpy as np

from paceline.types import Completion, Finish, Group, Prompt, Trajectory


@dataclass(slots=True)
class Call:
    """One call of `generate`."""

    context: tuple[int, ...] | str  # its tokens; read from a checkpoint: their digest
    completion: Completion | None = None  # so far; the engine may have more tokens
    request_id: str = ""  # of the last request to an engine

    @property
    def digest(self) -> str:
        return self.context if isinstance(self.context, str) else _digest(self.context)

    def has(self, context: tuple[int, ...]) -> bool:
        """Return whether this is a call with the same context."""
        if isinstance(self.context, str):
            return self.context == _digest(context)
        return self.context == context


@dataclass(frozen=True, slots=True)
class Scored:
    """A group that is ready to be trained."""

    trajectories: tuple[Trajectory, ...]
    baseline: float | None = None


@dataclass(slots=True)
class GroupInFlight:
    uid: str  # of the prompt
    calls: dict[int, list[Call]] = field(default_factory=dict)  # of unfinished trajectories
    # Finished episodes, each with the trajectories of its agents, not scored.
    finished: dict[int, tuple[Trajectory, ...]] = field(default_factory=dict)
    scored: Scored | None = None

    @classmethod
    def of(cls, group: Group) -> "GroupInFlight":
        return cls(group.prompt.uid, scored=Scored(group.trajectories, group.baseline))

    def group(self, seq: int, prompt: Prompt, now: float) -> Group:
        assert self.scored
        return Group(seq, prompt, self.scored.trajectories, now, now, self.scored.baseline)

    def begin_call(self, index: int, number: int, context: tuple[int, ...]) -> Call:
        """Return the record of a trajectory's call; it has a completion if one was saved."""
        calls = self.calls.setdefault(index, [])
        if number < len(calls) and calls[number].has(context):
            calls[number].context = context
        else:  # an agent loop that is not deterministic took another path
            calls[number:] = [Call(context)]
        return calls[number]

    def finish(self, index: int, trajectories: tuple[Trajectory, ...]) -> None:
        self.finished[index] = trajectories
        self.calls.pop(index, None)

    def copy(self) -> "GroupInFlight":
        """Return a copy that further calls do not change. Their completions are shared."""
        calls = {index: list(calls) for index, calls in self.calls.items()}
        return replace(self, calls=calls, finished=dict(self.finished))

    def up_to(self, version: int, partials: Mapping[str, Completion]) -> "GroupInFlight":
        """Return the group with the tokens in the engines, without those of later versions."""
        calls = {
            index: list(
                takewhile(
                    lambda call: call.completion is not None,
                    (Call(call.digest, _known(call, version, partials)) for call in calls),
                )
            )
            for index, calls in self.calls.items()
        }
        return replace(self, calls=calls)

    def within(self, oldest: int) -> "GroupInFlight":
        """Return the group without episodes that have a token older than version `oldest`."""
        scored = self.scored
        if scored and min(t.version_min for t in scored.trajectories) < oldest:
            scored = None  # rewards may depend on the whole group
        return replace(
            self,
            calls={i: c for i, c in self.calls.items() if _version_min(c, oldest) >= oldest},
            finished={
                i: episode
                for i, episode in self.finished.items()
                if min(trajectory.version_min for trajectory in episode) >= oldest
            },
            scored=scored,
        )

    def completions(self) -> Iterator[Completion]:
        scored = self.scored.trajectories if self.scored else ()
        for trajectory in (*chain.from_iterable(self.finished.values()), *scored):
            yield from (turn.completion for turn in trajectory.turns)
        for calls in self.calls.values():
            yield from (call.completion for call in calls if call.completion is not None)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.completions()))


def fresh_enough(
    groups: Mapping[int, GroupInFlight],
    order: Sequence[int],
    step: int,
    groups_per_step: int,
    max_staleness: int,
) -> dict[int, GroupInFlight]:
    """Return what may be continued of groups that are trained in this order, from `step` on."""
    due = {seq: step + position // groups_per_step for position, seq in enumerate(order)}
    kept = {
        seq: group.within(due[seq] - max_staleness) for seq, group in groups.items() if seq in due
    }
    return {seq: group for seq, group in kept.items() if group.num_tokens}


def _known(call: Call, version: int, partials: Mapping[str, Completion]) -> Completion | None:
    """Return what a call has generated; None if that is nothing."""
    # An engine is asked after the state was copied, so a finished completion may be newer. The
    # second request of a hedged completion has the ID with a plus sign.
    found = [call.completion, *(partials.get(call.request_id + end) for end in ("", "+"))]
    longest = max((each for each in found if each is not None), key=len, default=None)
    if longest is None:
        return None
    newer = np.flatnonzero(longest.versions > version)
    if len(newer):
        kept = slice(0, int(newer[0]))
        longest = Completion(
            longest.tokens[kept], longest.logprobs[kept], longest.versions[kept], Finish.INTERRUPT
        )
    return longest if len(longest) else None


def _version_min(calls: Sequence[Call], default: int) -> int:
    found = [int(call.completion.versions.min()) for call in calls if call.completion is not None]
    return min(found, default=default)


def _digest(context: tuple[int, ...]) -> str:
    return hashlib.blake2b(np.array(context, np.int64).tobytes(), digest_size=16).hexdigest()
