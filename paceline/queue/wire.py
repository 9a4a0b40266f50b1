"""Groups as bytes: a small header, then every attempt's numbers laid end to end as flat arrays. Nothing is pickled, and what is
read are views into the bytes that arrived.

    length of header (u32) | header (JSON) | padding to 8 | tables of trajectories and turns | prompts | tokens | log-probs | versions
"""

import json
import struct
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn

Buffer = bytes | bytearray | memoryview

FINISHES = tuple(Finish)
FORMAT = 1
_LENGTH = struct.Struct("<I")
_TRAJECTORY = np.dtype([("turns", "<i4"), ("text", "<i4"), ("scored", "<i4"), ("unused", "<i4"), ("reward", "<f8")])
_TURN = np.dtype([("prompt", "<i4"), ("answer", "<i4"), ("finish", "<i4"), ("unused", "<i4"), ("reward", "<f8")])


class WireError(PacelineError):
    """Bytes that are not a group."""


def encode(group: Group) -> bytes:
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    trajectory_table = np.zeros(len(group.trajectories), _TRAJECTORY)
    texts = [trajectory.text.encode("utf-8", "surrogatepass") for trajectory in group.trajectories]
    for row, (trajectory, text) in enumerate(zip(group.trajectories, texts, strict=True)):
        scored = trajectory.reward is not None
        trajectory_table[row] = (len(trajectory.turns), len(text), scored, 0, trajectory.reward if scored else 0.0)
    turn_table = np.zeros(len(turns), _TURN)
    for row, turn in enumerate(turns):
        turn_table[row] = (len(turn.prompt), len(turn.completion), FINISHES.index(turn.completion.finish), 0, turn.reward)
    header: dict[str, Any] = {
        "format": FORMAT,
        "seq": group.seq,
        "prompt": [group.prompt.uid, group.prompt.tokens, group.prompt.text, dict(group.prompt.row)],
        "times": [group.started_s, group.finished_s],
        "baseline": group.baseline,
        "details": [dict(trajectory.details) for trajectory in group.trajectories],
        "counts": [len(group.trajectories), len(turns)],
    }
    try:
        head = json.dumps(header, separators=(",", ":")).encode()
    except TypeError as error:
        raise WireError(f"the row of prompt {group.prompt.uid} cannot travel: {error}; use numbers, text, lists and tables") from None
    completions = [turn.completion for turn in turns]
    parts = [
        _LENGTH.pack(len(head)) + head + bytes(-(_LENGTH.size + len(head)) % 8),
        trajectory_table,
        turn_table,
        np.array([token for turn in turns for token in turn.prompt], "<i4"),
        _joined([completion.tokens for completion in completions], "<i4"),
        _joined([completion.logprobs for completion in completions], "<f4"),
        _joined([completion.versions for completion in completions], "<i4"),
        *texts,
    ]
    return b"".join(part if isinstance(part, bytes) else memoryview(part).cast("B") for part in parts)


def decode(buffer: Buffer) -> Group:
    """The group; its arrays are views into `buffer`, which must not change any more."""
    try:
        return _decode(buffer)
    except (ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        raise WireError(f"{len(buffer)} bytes that are not a group of format {FORMAT}: {error}") from error


def _decode(buffer: Buffer) -> Group:
    (length,) = _LENGTH.unpack_from(buffer)
    header = json.loads(bytes(buffer[_LENGTH.size : _LENGTH.size + length]))
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}")
    at = -(-(_LENGTH.size + length) // 8) * 8

    def take(dtype: Any, count: int) -> Any:
        nonlocal at
        array = np.frombuffer(buffer, dtype, count, at)
        at += array.nbytes
        return array

    trajectory_table, turn_table = (take(dtype, count) for dtype, count in zip((_TRAJECTORY, _TURN), header["counts"], strict=True))
    prompts = take("<i4", int(turn_table["prompt"].sum()))
    total = int(turn_table["answer"].sum())
    tokens, logprobs, versions = take("<i4", total), take("<f4", total), take("<i4", total)
    turns = []
    asked, answered = _offsets(turn_table["prompt"]), _offsets(turn_table["answer"])
    for (a, b), (c, d), finish, reward in zip(
        pairwise(asked), pairwise(answered), turn_table["finish"].tolist(), turn_table["reward"].tolist(), strict=True
    ):
        completion = Completion(tokens[c:d], logprobs[c:d], versions[c:d], FINISHES[finish])
        turns.append(Turn(tuple(prompts[a:b].tolist()), completion, reward))
    trajectories = []
    for (a, b), row, details in zip(
        pairwise(_offsets(trajectory_table["turns"])), trajectory_table.tolist(), header["details"], strict=True
    ):
        _, text_length, scored, _, reward = row
        text = bytes(take("u1", text_length)).decode("utf-8", "surrogatepass")
        trajectories.append(Trajectory(tuple(turns[a:b]), text, reward if scored else None, details))
    uid, prompt_tokens, text, fields = header["prompt"]
    prompt = Prompt(uid, tuple(prompt_tokens), text, fields)
    started, finished = header["times"]
    return Group(header["seq"], prompt, tuple(trajectories), started, finished, header["baseline"])


def _joined(arrays: list[Any], dtype: str) -> Any:
    return np.ascontiguousarray(np.concatenate(arrays) if arrays else np.zeros(0), dtype)


def _offsets(lengths: Any) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]
