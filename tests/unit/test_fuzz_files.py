"""Random and damaged GGUF files, groups in flight, dumps and messages; see test_fuzz.py."""

import asyncio
import io
import json
import random
import shutil
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError, DataError, ModelError
from paceline.model.gguf_cache import convert_to
from paceline.remote.listener import connect
from paceline.replay import replay_dump
from paceline.rollout.in_flight import Call, GroupInFlight, Scored, fresh_enough
from paceline.rollout.in_flight_files import FOLDER, GROUPS, TOKENS, read_in_flight, write_in_flight
from paceline.sync.meeting import REQUEST, Meeting, MemberStore, meet
from paceline.training.skipped import Dump, read_dump, write_dump
from paceline.types import Batch, Completion, Finish, Prompt, Trajectory, Turn
from tests.files import rewrite
from tests.unit.test_fuzz import INPUTS, damaged_json, flipped, generator, inputs, rejected

__all__ = ["generator"]


@pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")  # damaged weights
def test_any_gguf_file_is_converted_or_model_error(
    tmp_path: Path, generator: random.Random
) -> None:
    pytest.importorskip("gguf")
    from tests.gguf_files import random_gguf

    content = random_gguf(tmp_path / "model.gguf").read_bytes()
    header = content.rindex(b"ffn_down") + 100  # what follows are weights
    path, folder, outcomes = tmp_path / "damaged.gguf", tmp_path / "converted", set()
    for number in inputs():
        damaged = flipped(content[:header], generator) + content[header:]
        if number % 4 == 0:
            damaged = damaged[: generator.randrange(len(damaged))]
        elif number % 4 == 1:
            damaged = content[:header] + flipped(content[header:], generator)
        rewrite(path, damaged if number else generator.randbytes(200))
        outcomes.add(rejected(ModelError, lambda: convert_to(path, folder)))
        shutil.rmtree(folder, ignore_errors=True)
    assert outcomes == {True, False}


def completion(length: int, version: int) -> Completion:
    numbers = np.arange(length, dtype=np.int32)
    return Completion(numbers, numbers.astype(np.float32), numbers * 0 + version, Finish.STOP)


IN_FLIGHT = {
    7: GroupInFlight(
        "p7",
        calls={1: [Call("ab" * 16, completion(2, 2))]},
        finished={0: (Trajectory((Turn((1, 2), completion(1, 1)),), "é"),)},
    ),
    8: GroupInFlight(
        "p8",
        scored=Scored((Trajectory((Turn((1,), completion(3, 0)),), "b", 1.0, {"x": 0.5}),), 0.5),
    ),
}


def use_in_flight(groups: dict[int, GroupInFlight]) -> None:
    """Do what a resumed run does with the groups it has read."""
    for seq, group in fresh_enough(groups, sorted(groups), 2, 4, 2).items():
        group.begin_call(1, 0, (1, 2, 3))
        if group.scored:
            made = group.group(seq, Prompt("p", (1,), "p", {}), 0.0)
            assert all(
                isinstance(sum(each.details.values()), int | float) for each in made.trajectories
            )
        assert json.dumps([seq, group.uid, group.num_tokens])


def test_any_groups_in_flight_are_read_or_checkpoint_error(
    tmp_path: Path, generator: random.Random
) -> None:
    write_in_flight(tmp_path, IN_FLIGHT)
    groups, tokens = (tmp_path / FOLDER / name for name in (GROUPS, TOKENS))
    rows, arrays, outcomes = json.loads(groups.read_bytes()), tokens.read_bytes(), set()
    for number in inputs(3 * INPUTS):
        damaged = number % 3 > 0
        rewrite(groups, damaged_json(rows, generator) if damaged else json.dumps(rows).encode())
        rewrite(tokens, arrays if damaged else flipped(arrays, generator))
        outcomes.add(rejected(CheckpointError, lambda: use_in_flight(read_in_flight(tmp_path))))
    assert outcomes == {True, False}


def dumped() -> Dump:
    ones = np.ones(6, np.float32)
    batch = Batch(
        tokens=np.arange(6, dtype=np.int32),
        lengths=np.array([2, 4], np.int32),
        mask=ones > 0,
        logprobs=ones,
        versions=np.zeros(6, np.int32),
        rewards=ones[:2],
        groups=np.array([0, 1], np.int32),
        advantages=ones,
    )
    return Dump(batch, 3, 0.1, {"steps": 5})


def wrong_arrays(arrays: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """Return the arrays of a dump with one missing, unexpected or replaced."""
    name = generator.choice(list(arrays))
    others = {key: value for key, value in arrays.items() if key != name}
    kind = generator.randrange(4)
    if kind == 0:
        return others
    if kind == 1:
        return arrays | {"unexpected": arrays[name]}
    if name == "json" or kind == 2:
        rest = json.loads(arrays["json"].tobytes())
        return arrays | {"json": np.frombuffer(damaged_json(rest, generator), np.uint8)}
    wrong = [arrays[name][:-1], arrays[name][None], arrays[name].astype("U1"), arrays[name][:0]]
    return others | {name: generator.choice([*wrong, np.array("x"), arrays[name] * 1.5])}


def test_any_dump_of_update_is_read_or_data_error(tmp_path: Path, generator: random.Random) -> None:
    path = tmp_path / "dump.npz"
    write_dump(path, dumped())
    content, outcomes = path.read_bytes(), set()
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}

    def use() -> None:
        batch = read_dump(path).batch
        assert batch.mask.dtype == bool and batch.offsets[-1] == batch.num_tokens
        assert (batch.lengths > 0).all() and len(batch.groups) == batch.num_rows
        batch.tokens[batch.mask], batch.rewards + 0.5

    for number in inputs(3 * INPUTS):
        if number % 2:
            rewrite(path, flipped(content, generator))
        else:
            output = io.BytesIO()
            np.savez(output, **wrong_arrays(arrays, generator))
            rewrite(path, output.getvalue())
        outcomes.add(rejected(DataError, use))
    assert outcomes == {True, False}


def test_any_message_of_member_leaves_meeting_usable(generator: random.Random) -> None:
    token = bytes(32)
    meeting = Meeting("127.0.0.1", token)
    member: MemberStore = meet(meeting.address, token, 5)
    for number in inputs(3 * INPUTS):
        key, value = generator.randbytes(generator.randrange(9)), generator.randbytes(3)
        fields = [generator.randrange(6), len(key), len(value), generator.choice([0, -1, 1e-3])]
        if generator.random() < 0.2:
            fields[generator.choice([1, 2])] = generator.choice([0, 1 << 20, (1 << 32) - 1])
        message = REQUEST.pack(*fields) + key + value
        message = flipped(message, generator) if number % 2 else message
        with suppress(OSError), connect(meeting.address, token, b"", 5) as connection:
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
    member.set("key", b"value")
    assert member.get("key") == b"value"


@pytest.mark.parametrize("settings", [{"steps": "many"}, {"unknown": 1}, {"data": [3]}])
def test_replay_of_dump_with_wrong_settings_is_data_error(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "dump.npz"
    write_dump(path, replace(dumped(), config=settings))
    with pytest.raises(DataError, match="settings are not valid"):
        asyncio.run(replay_dump(path))
