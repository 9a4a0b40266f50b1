"""Check of asynchronous runs: an engine that loaded a version computes with its weights.

Tokens of an asynchronous run are trained when the trainer has a newer version. Their log-probs then
differ because the policy has changed, so wrong weights of an engine go unnoticed. Instead, after
each sync every engine takes given completions token by token, and its log-probs must equal those of
the trainer, which still has this version.

Waits for: the trainer and the engines. Awaited by: the next sync, for a few seconds at most. A
difference ends the run.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import numpy as np

from paceline.errors import MismatchError, RolloutError, WorkerDied
from paceline.remote.worker import Worker, mark_seen
from paceline.rollout.fleet import Fleet
from paceline.rollout.member import Member
from paceline.types import Batch, FloatArray, Group, Request, Role, Sampling

ROWS, TOKENS = 8, 8  # completions, and tokens of each
MIN_TOKENS = 16  # that make a mean reliable

Row = tuple[tuple[int, ...], tuple[int, ...]]  # context and tokens that follow


class WeightCheck:
    def __init__(self, actor: Worker, fleet: Fleet, temperature: float, limit: float) -> None:
        self._actor, self._fleet = actor, fleet
        self._temperature, self._limit = temperature, limit

    def begin(self, groups: Sequence[Group], version: int) -> Coroutine[Any, Any, None]:
        """Start the check of a version that the engines have loaded, and return the rest of it.

        Call this before the trainer changes its weights. `groups` provide the completions.
        """
        rows = _rows(groups)
        if not rows:
            return asyncio.sleep(0)
        expected = mark_seen(self._actor.start_call(Role.ACTOR, "logprobs", _batch(rows)))
        members = [member for member in self._fleet.in_rotation if member.version == version]
        return self._finish(rows, expected, members, version)

    async def _finish(
        self,
        rows: Sequence[Row],
        expected: Awaitable[FloatArray],
        members: Sequence[Member],
        version: int,
    ) -> None:
        ends = np.cumsum([len(prompt) + len(tokens) for prompt, tokens in rows])[:-1]
        of_rows = np.split(await expected, ends)
        logprobs = [row[len(prompt) :] for (prompt, _), row in zip(rows, of_rows, strict=True)]
        checks = [self._compare(member, rows, logprobs, version) for member in members]
        await asyncio.gather(*checks)

    async def _compare(
        self, member: Member, rows: Sequence[Row], expected: Sequence[FloatArray], version: int
    ) -> None:
        """Raise MismatchError if the log-probs of an engine are not the expected ones."""
        requests = [
            Request(
                f"check-{version}-{number}",
                prompt,
                0,
                Sampling(len(tokens), temperature=self._temperature),
                forced=tokens,
            )
            for number, (prompt, tokens) in enumerate(rows)
        ]
        try:
            found = await asyncio.gather(*map(member.engine.generate, requests))
        except (WorkerDied, RolloutError):
            return  # the fleet replaces the engine
        differences = np.concatenate(
            [
                np.abs(completion.logprobs - row[: len(completion)])[completion.versions == version]
                for completion, row in zip(found, expected, strict=True)
            ]
        )  # a later sync may have changed the version on the way
        mean = float(differences.mean()) if len(differences) else 0.0
        if len(differences) >= MIN_TOKENS and not mean <= self._limit:
            raise MismatchError(
                f"engine {member.name!r} and trainer do not have the same weights of version "
                f"{version}: their log-probs of {len(differences)} given tokens differ by "
                f"{mean:.3g} on average (sync.mismatch_limit = {self._limit:g}), by at most "
                f"{differences.max():.3g}. Either the weight sync lost or misplaced a tensor, or "
                "the two compute differently (temperature, dtype)"
            )


def _rows(groups: Sequence[Group]) -> list[Row]:
    """Return parts of the first completions, each with what precedes it.

    Parts of one prompt are at different positions, because first tokens are often alike.
    """
    turns = [each.turns[0] for group in groups for each in group.trajectories]
    rows: list[Row] = []
    for number, turn in enumerate([turn for turn in turns if len(turn.completion)][:ROWS]):
        tokens = turn.completion.tokens.tolist()
        start = max(0, min(len(tokens) - TOKENS, number * TOKENS))
        rows.append(((*turn.prompt, *tokens[:start]), tuple(tokens[start : start + TOKENS])))
    return rows


def _batch(rows: Sequence[Row]) -> Batch:
    tokens = np.concatenate([np.array(prompt + made, np.int32) for prompt, made in rows])
    mask = np.concatenate(
        [np.arange(len(prompt) + len(made)) >= len(prompt) for prompt, made in rows]
    )
    return Batch(
        tokens=tokens,
        lengths=np.array([len(prompt) + len(made) for prompt, made in rows], np.int32),
        mask=mask,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=np.zeros(len(rows), np.float32),
        groups=np.zeros(len(rows), np.int32),
    )
