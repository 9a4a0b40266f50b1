"""Files of a checkpoint with the groups in flight: their structure as JSON, their tokens as arrays.

A completion is an entry of the list `completions`, with the number of its tokens; the arrays have
the tokens of all completions one after another.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from paceline.errors import CheckpointError
from paceline.rollout.in_flight import Call, GroupInFlight, Scored
from paceline.types import Completion, End, Finish, Trajectory, Turn

FOLDER = "in_flight"
GROUPS, TOKENS = "groups.json", "tokens.safetensors"
ARRAYS = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
# What reading raises if a file has another content than expected.
UNEXPECTED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def write_in_flight(checkpoint: Path, groups: Mapping[int, GroupInFlight]) -> None:
    """Write the groups that have tokens; nothing if there are none."""
    completions: list[Completion] = []

    def add(completion: Completion) -> int:
        completions.append(completion)
        return len(completions) - 1

    rows = [_group_row(seq, group, add) for seq, group in groups.items() if group.num_tokens]
    if not rows:
        return
    folder = checkpoint / FOLDER
    folder.mkdir()
    listed = [[len(completion), completion.finish.value] for completion in completions]
    (folder / GROUPS).write_text(json.dumps({"groups": rows, "completions": listed}))
    arrays = {
        name: np.concatenate([getattr(each, name) for each in completions]).astype(dtype)
        for name, dtype in ARRAYS.items()
    }
    save_file(arrays, folder / TOKENS)


def read_in_flight(checkpoint: Path) -> dict[int, GroupInFlight]:
    """Return the groups in flight by their position in the stream. Raises CheckpointError."""
    folder = checkpoint / FOLDER
    if not folder.exists():
        return {}
    try:
        found = json.loads((folder / GROUPS).read_text())
        completions = _completions(found["completions"], load_file(folder / TOKENS))
        return {int(row["seq"]): _group(row, completions) for row in found["groups"]}
    except (*UNEXPECTED, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint}: the groups in {FOLDER} cannot be read: "
            f"{type(error).__name__}: {error}. Start from another checkpoint with --from STEP (in "
            "Python: resume_from=STEP)"
        ) from error


def _completions(listed: Any, arrays: Mapping[str, Any]) -> list[Completion]:
    parts: list[Any] = [np.asarray(arrays[name], dtype) for name, dtype in ARRAYS.items()]
    ends = np.cumsum([int(length) for length, _ in listed])
    if {part.shape for part in parts} != {(int(ends[-1]),)} or min(n for n, _ in listed) < 0:
        raise ValueError("the arrays do not have the lengths of the completions")
    tokens, logprobs, versions = (np.split(part, ends[:-1]) for part in parts)
    finishes = [Finish(finish) for _, finish in listed]
    return list(map(Completion, tokens, logprobs, versions, finishes))


def _group_row(seq: int, group: GroupInFlight, add: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"seq": seq, "uid": group.uid}
    if group.scored:
        row["baseline"] = group.scored.baseline
        row["scored"] = [_trajectory_row(each, add) for each in group.scored.trajectories]
    row["finished"] = [
        [i, _trajectory_row(each, add)] for i, episode in group.finished.items() for each in episode
    ]
    row["calls"] = [
        [i, [[call.digest, add(call.completion)] for call in calls if call.completion is not None]]
        for i, calls in group.calls.items()
    ]
    return row


def _group(row: Any, completions: list[Completion]) -> GroupInFlight:
    scored = None
    if "scored" in row:
        trajectories = tuple(_trajectory(each, completions) for each in row["scored"])
        if not trajectories:
            raise ValueError("a scored group has no trajectories")
        scored = Scored(trajectories, None if row["baseline"] is None else float(row["baseline"]))
    finished: dict[int, tuple[Trajectory, ...]] = {}
    for i, each in row["finished"]:
        finished[int(i)] = (*finished.get(int(i), ()), _trajectory(each, completions))
    return GroupInFlight(
        str(row["uid"]),
        {int(i): [Call(str(c), completions[n]) for c, n in calls] for i, calls in row["calls"]},
        finished,
        scored,
    )


def _trajectory_row(trajectory: Trajectory, add: Any) -> dict[str, Any]:
    return {
        "turns": [
            [
                [int(token) for token in turn.prompt],
                add(turn.completion),
                float(turn.reward),
                bool(turn.restarts),
            ]
            for turn in trajectory.turns
        ],
        "text": str(trajectory.text),
        "reward": None if trajectory.reward is None else float(trajectory.reward),
        "details": {str(name): float(value) for name, value in trajectory.details.items()},
        "end": trajectory.end and trajectory.end.value,
        "agent": str(trajectory.agent),
    }


def _trajectory(row: Any, completions: list[Completion]) -> Trajectory:
    turns = tuple(
        Turn(tuple(map(int, prompt)), completions[number], float(reward), bool(restarts))
        for prompt, number, reward, restarts in row["turns"]
    )
    reward = None if row["reward"] is None else float(row["reward"])
    end = None if row["end"] is None else End(row["end"])
    details = {str(name): float(value) for name, value in row["details"].items()}
    if not turns:
        raise ValueError("a trajectory has no turns")
    return Trajectory(turns, str(row["text"]), reward, details, end, str(row["agent"]))
