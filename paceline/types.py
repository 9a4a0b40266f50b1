"""Data types that the parts of a run exchange: immutable, with numpy arrays, without torch.

A Prompt becomes a Group of Trajectories (the completions of one prompt). A Trajectory has one or
more Turns (one generation each). The Groups of a train step become one Batch of flat arrays.
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
# Largest magnitude of a reward: advantages need its square, in float32.
MAX_REWARD = 1e18


class Role(StrEnum):
    """The task of a worker. The placement decides which roles share devices."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REF = "ref"
    CRITIC = "critic"
    REWARD = "reward"


class OnSync(StrEnum):
    """What happens to running generations when new weights arrive."""

    DRAIN = "drain"  # let them finish on the old weights first
    INTERRUPT = "interrupt"  # keep their tokens, resume on the new weights with a new KV cache
    SWAP = "swap"  # change the weights between two decode steps, keep the KV cache


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_new_tokens reached
    ABORT = "abort"  # canceled; the partial completion is returned
    INTERRUPT = "interrupt"  # for a weight sync; resumable from the partial completion


class End(StrEnum):
    """Why a conversation ended."""

    DONE = "done"  # the environment ended it
    TURNS = "turns"  # rollout.max_turns reached
    LENGTH = "length"  # a completion reached its maximum length
    CONTEXT = "context"  # all turns together reached the maximum length


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, tokenized."""

    uid: str  # stable identity: "train.jsonl:17", "reverse:3"
    tokens: tuple[int, ...]
    text: str
    row: Mapping[str, Any]  # the fields of the dataset row, for the reward function


def copied_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a row with copies of the dicts and lists in it, but no other objects.

    User code appends to the messages of a row, and the dataset keeps the row for later epochs.
    """
    return {name: _copied(value) for name, value in row.items()}


def _copied(value: Any) -> Any:
    if type(value) is dict:  # not a defaultdict, which would lose its methods
        return {name: _copied(each) for name, each in value.items()}
    if type(value) is list:  # which may have the tokens of all completions of a group
        return [_copied(each) if type(each) in (dict, list) else each for each in value]
    return value


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Log-probs are those of the distribution after applying all of them."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 = greedy; log-probs are then taken at temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # stop strings; the matched text stays in the completion


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one generation: each token with its log-prob and the policy version that
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
    """One sequence to generate.

    Random numbers depend only on (seed, position, token ID). So a completion does not depend on the
    batch composition, and a resumed completion equals an uninterrupted one.
    """

    id: str
    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling
    partial: Completion | None = None  # resume from here; max_new_tokens includes these tokens
    forced: tuple[int, ...] = ()  # tokens to take instead of sampled ones; vLLM only


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of a trajectory: the prompt tokens since the last turn, and the completion."""

    prompt: tuple[int, ...]
    completion: Completion
    reward: float = 0.0  # of this turn, at its last token, in addition to the trajectory's
    # `prompt` is the whole context again, because it does not continue the previous turn: this turn
    # begins a new row of the batch.
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One completion of a prompt, or one conversation of several turns.

    It gives one row of the batch, and one more for each later turn that restarts.
    """

    turns: tuple[Turn, ...]
    text: str  # of the final completion
    reward: float | None = None  # None until scored
    details: Mapping[str, float] = field(default_factory=dict)
    end: End | None = None  # of a conversation with an environment
    agent: str = ""  # which of several agents of an episode; compared with the same one elsewhere

    @property
    def rows(self) -> list[tuple[Turn, ...]]:
        """The turns of each row of the batch."""
        starts = [n for n, turn in enumerate(self.turns) if n == 0 or turn.restarts]
        ends = [*starts[1:], len(self.turns)]
        return [self.turns[start:end] for start, end in zip(starts, ends, strict=True)]

    @property
    def version_min(self) -> int:
        return min(int(t.completion.versions.min()) for t in self.turns if len(t.completion))

    @property
    def num_tokens(self) -> int:
        return sum(len(t.completion) for t in self.turns)

    @property
    def total_reward(self) -> float:
        """The sum of its reward and those of its turns."""
        return (self.reward or 0.0) + sum(turn.reward for turn in self.turns)

    def scored(self, reward: float, details: Mapping[str, float] | None = None) -> "Trajectory":
        return replace(self, reward=reward, details=details or {})


Score = float | Mapping[str, float]
"""The result of a reward function for one completion: a number, or several by name, of which
"reward" is trained on and the others are recorded."""


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one prompt: the unit of admission, queue and ledger."""

    seq: int  # position in the stream of prompts; unique in a run
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    started_s: float
    finished_s: float
    baseline: float | None = None  # reward of the greedy completion, if the algorithm needs it

    @property
    def version_min(self) -> int:
        return min(t.version_min for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one train step: R concatenated rows, T tokens in total, as flat arrays that are
    cheap to send to another process.

    Per-token arrays are aligned with `tokens`: entry t describes token t, not the token that it
    predicts.
    """

    tokens: IntArray  # [T]
    lengths: IntArray  # [R] tokens per row
    mask: BoolArray  # [T] sampled by the policy, so trained on; false for the first token of a row
    logprobs: FloatArray  # [T] under the policy that sampled the token; 0 where mask is false
    versions: IntArray  # [T] policy version that sampled the token; -1 where mask is false
    rewards: FloatArray  # [R]
    groups: IntArray  # [R] the same number for trajectories that are compared with each other
    advantages: FloatArray | None = None  # [T]
    returns: FloatArray | None = None  # [T] regression targets of the critic
    values: FloatArray | None = None  # [T] the critic's predictions before the update
    ref_logprobs: FloatArray | None = None  # [T]
    truncated: BoolArray | None = None  # [R] the completion reached its maximum length
    # [T] rewards of turns, at their last tokens; `rewards` are added at the last token of the row
    token_rewards: FloatArray | None = None
    baselines: FloatArray | None = None  # [R] reward of the greedy completion of the prompt
    # [R] number of the row's trajectory, whose rows follow each other; None: each has one row
    trajectories: IntArray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[R + 1] start of each row in the flat arrays, and the end of the last."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
