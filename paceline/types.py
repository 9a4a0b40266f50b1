"""The nouns that travel through the loop. Plain frozen data; numpy for arrays, never torch.

Prompt -> Group (n attempts at one prompt) -> Trajectory (one attempt) -> Turn (one generation) ->
Batch (flat arrays for one step).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class Role(StrEnum):
    """What a worker is for. Never fused: which roles share devices is the placement's business."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REF = "ref"
    CRITIC = "critic"
    REWARD = "reward"


class OnSync(StrEnum):
    """What happens to running generations when new weights arrive."""

    DRAIN = "drain"  # let them finish on the old weights first
    INTERRUPT = (
        "interrupt"  # stop them, keep their tokens, resume on the new weights with a fresh KV cache
    )
    SWAP = "swap"  # change the weights between two decode steps, keep the KV cache


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_new_tokens reached
    ABORT = "abort"  # given up; the partial answer is returned
    INTERRUPT = "interrupt"  # stopped for a weight sync; can be resumed from the partial answer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One item of the data set, ready to be generated from."""

    uid: str  # stable identity: "train.jsonl:17", "reverse:3"
    tokens: tuple[int, ...]
    text: str
    row: Mapping[str, Any]  # the data set row; what the reward sees


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Log-probabilities are those of the distribution after all of this is
    applied."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 = greedy; log-probs are then taken at temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # stop strings; the text that matched stays in the answer


@dataclass(frozen=True, slots=True)
class Completion:
    """What one generation produced: token by token, with the log-prob and the policy version that
    sampled it."""

    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish: Finish

    def __len__(self) -> int:
        return len(self.tokens)


def empty_completion(finish: Finish = Finish.INTERRUPT) -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), finish)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. Random numbers come from (seed, position, token id) alone, so the
    answer does not depend on what else is in the batch, and a resumed answer equals an
    uninterrupted one."""

    id: str
    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling
    partial: Completion | None = None  # go on from here; max_new_tokens counts these tokens too


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation inside an attempt: the tokens it was shown since the last turn, and what it
    answered."""

    prompt: tuple[int, ...]
    completion: Completion
    reward: float = (
        0.0  # for this turn alone, paid at its last token; the trajectory's own comes on top
    )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a prompt."""

    turns: tuple[Turn, ...]
    text: str  # the final answer as text
    reward: float | None = None  # None until scored
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def version_min(self) -> int:
        return min(int(t.completion.versions.min()) for t in self.turns if len(t.completion))

    @property
    def num_tokens(self) -> int:
        return sum(len(t.completion) for t in self.turns)

    @property
    def total_reward(self) -> float:
        """Its own, and those of its turns."""
        return (self.reward or 0.0) + sum(turn.reward for turn in self.turns)

    def scored(self, reward: float, details: Mapping[str, float] | None = None) -> "Trajectory":
        return replace(self, reward=reward, details=details or {})


Score = float | Mapping[str, float]
"""What a reward gives for one attempt: a number, or several by name, of which "reward" counts and
the others are for the record."""


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one prompt: the unit of admission, queue and ledger."""

    seq: int  # position in the stream of prompts; unique in a run
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    started_s: float
    finished_s: float
    baseline: float | None = None  # reward of a greedy answer, when the algorithm asks for one

    @property
    def version_min(self) -> int:
        return min(t.version_min for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one train step eats: R rows laid end to end (T tokens in all), as flat arrays that cross
    processes cheaply.

    Per-token arrays line up with `tokens`: entry t speaks of token t itself (not of the one it
    predicts).
    """

    tokens: IntArray  # [T]
    lengths: IntArray  # [R] tokens per row
    mask: BoolArray  # [T] sampled by the policy, so trained on; the first token of a row is never masked in
    logprobs: FloatArray  # [T] under the policy that sampled it; 0 where not mask
    versions: IntArray  # [T] policy version that sampled it; -1 where not mask
    rewards: FloatArray  # [R]
    groups: IntArray  # [R] the same number for attempts at the same prompt
    advantages: FloatArray | None = None  # [T]
    returns: FloatArray | None = None  # [T] targets of the critic
    values: FloatArray | None = None  # [T] the critic's values when the batch was taken
    ref_logprobs: FloatArray | None = None  # [T]
    truncated: BoolArray | None = None  # [R] the answer was cut off at its longest allowed length
    token_rewards: FloatArray | None = (
        None  # [T] rewards paid at single tokens (turns); `rewards` come on top, at the last token
    )
    baselines: FloatArray | None = None  # [R] reward of the greedy answer to the same prompt

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[R + 1] where each row starts in the flat arrays."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
