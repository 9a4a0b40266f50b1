"""Groups as bytes: a small header, then every attempt's numbers laid end to end as flat arrays. Nothing is pickled, and what is
read are views into the bytes that arrived.

    length of header (u32) | header (JSON) | padding to 8 | trajectories | turns | prompts | tokens | log-probs | versions | texts

A turn that was shown the group's prompt, as nearly all are, says so instead of repeating it.
"""

import itertools
import json
import struct
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn

Buffer = bytes | bytearray | memoryview

FINISHES = tuple(Finish)
FORMAT = 1
_LENGTH = struct.Struct("<I")
_TRAJECTORY = np.dtype([("turns", "<i4"), ("text", "<i4"), ("scored", "<i8"), ("reward", "<f8")])
_TURN = np.dtype([("prompt", "<i4"), ("answer", "<i4"), ("finish", "<i8"), ("reward", "<f8")])
_SAME = -1  # length of a turn's prompt that is the group's


class WireError(PacelineError):
    """Bytes that are not a group."""


def encode(group: Group) -> bytes:
    asked = group.prompt.tokens
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    prompts = [() if turn.prompt == asked else turn.prompt for turn in turns]
    texts = [trajectory.text.encode("utf-8", "surrogatepass") for trajectory in group.trajectories]
    completions = [turn.completion for turn in turns]
    trajectory_rows = [
        (len(trajectory.turns), len(text), trajectory.reward is not None, trajectory.reward or 0.0)
        for trajectory, text in zip(group.trajectories, texts, strict=True)
    ]
    turn_rows = [
        (
            _SAME if turn.prompt == asked else len(turn.prompt),
            len(turn.completion),
            FINISHES.index(turn.completion.finish),
            turn.reward,
        )
        for turn in turns
    ]
    head = _header(group, len(turns))
    return b"".join(
        [
            _LENGTH.pack(len(head)) + head + bytes(-(_LENGTH.size + len(head)) % 8),
            np.array(trajectory_rows, _TRAJECTORY).tobytes(),
            np.array(turn_rows, _TURN).tobytes(),
            np.array([*asked, *itertools.chain.from_iterable(prompts)], "<i4").tobytes(),
            *(np.ascontiguousarray(completion.tokens, "<i4").data for completion in completions),
            *(np.ascontiguousarray(completion.logprobs, "<f4").data for completion in completions),
            *(np.ascontiguousarray(completion.versions, "<i4").data for completion in completions),
            *texts,
        ]
    )


def _header(group: Group, turns: int) -> bytes:
    header: dict[str, Any] = {
        "format": FORMAT,
        "seq": group.seq,
        "prompt": [
            group.prompt.uid,
            len(group.prompt.tokens),
            group.prompt.text,
            dict(group.prompt.row),
        ],
        "times": [group.started_s, group.finished_s],
        "baseline": group.baseline,
        "details": [dict(trajectory.details) for trajectory in group.trajectories],
        "turns": turns,
    }
    try:
        return json.dumps(header, separators=(",", ":")).encode()
    except TypeError as error:
        raise WireError(
            f"the row of prompt {group.prompt.uid} cannot travel: {error}; use numbers, text, lists and tables"
        ) from None


def decode(buffer: Buffer) -> Group:
    """The group; its arrays are views into `buffer`, which must not change any more."""
    try:
        return _decode(buffer)
    except (ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        raise WireError(
            f"{len(buffer)} bytes that are not a group of format {FORMAT}: {error}"
        ) from error


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

    trajectory_table, turn_table = (
        take(_TRAJECTORY, len(header["details"])),
        take(_TURN, header["turns"]),
    )
    uid, asked_length, prompt_text, fields = header["prompt"]
    asked = tuple(take("<i4", asked_length).tolist())
    others = take("<i4", int(turn_table["prompt"].clip(0).sum())).tolist()
    total = int(turn_table["answer"].sum())
    tokens, logprobs, versions = take("<i4", total), take("<f4", total), take("<i4", total)
    turns: list[Turn] = []
    shown = made = 0
    for length, answer, finish, reward in turn_table.tolist():
        prompt = asked if length == _SAME else tuple(others[shown : shown + length])
        shown += max(0, length)
        part = slice(made, made + answer)
        made += answer
        turns.append(
            Turn(
                prompt,
                Completion(tokens[part], logprobs[part], versions[part], FINISHES[finish]),
                reward,
            )
        )
    trajectories = []
    first = 0
    for (count, text_length, scored, reward), details in zip(
        trajectory_table.tolist(), header["details"], strict=True
    ):
        text = bytes(take("u1", text_length)).decode("utf-8", "surrogatepass")
        trajectories.append(
            Trajectory(
                tuple(turns[first : first + count]), text, reward if scored else None, details
            )
        )
        first += count
    started, finished = header["times"]
    return Group(
        header["seq"],
        Prompt(uid, asked, prompt_text, fields),
        tuple(trajectories),
        started,
        finished,
        header["baseline"],
    )
