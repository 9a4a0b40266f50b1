"""Random and damaged inputs of every parser: accepted or rejected with a typed error, in time.

300 inputs a parser, in 10 seconds at most; PACELINE_FUZZ=10000 tries as many in any time,
FUZZ_SEED=n others.
"""

import asyncio
import gzip
import json
import os
import random
import string
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config
from paceline.control import Control
from paceline.data.files import find_files, read_files
from paceline.data.prompts import DataSettings, PromptSource
from paceline.data.tiny import make_tokenizer
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.run_dir import find_start, recorded_config
from paceline.training.checkpoint import verify_checkpoint
from paceline.translate.hydra import read_script
from tests.files import rewrite

INPUTS = int(os.environ.get("PACELINE_FUZZ", "300"))
LIMIT_S = float("inf") if "PACELINE_FUZZ" in os.environ else 10.0
SEED = int(os.environ.get("FUZZ_SEED", "0"))
SCALARS: list[Any] = [None, True, False, 0, -1, 1 << 70, 1.5, float("inf"), float("nan"), "", "x"]
SCALARS += ["a\x00b", "\ud800", "\x1b[2J", "../x", "/etc/passwd", "step", [], {}, "é" * 300]
WRONG_JSON = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"null"]
WRONG_JSON += [b'{"prompt": ' + b"7" * 5000 + b"}", b'"\\ud800"', b"[1, 2]", b"NaN", b"\x00" * 64]


def inputs(count: int = INPUTS) -> Iterator[int]:
    """Yield the numbers of the inputs to try, until the time is over."""
    begun = time.monotonic()
    return takewhile(lambda number: time.monotonic() - begun < LIMIT_S or not number, range(count))


def flipped(data: bytes, generator: random.Random) -> bytes:
    """Return the data with bits flipped, a part removed, repeated or replaced."""
    damaged = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 8])):
        at = generator.randrange(len(damaged)) if damaged else 0
        kind = generator.randrange(5)
        if kind <= 1 and damaged:
            damaged[at] ^= 1 << generator.randrange(8)
        elif kind == 2:
            del damaged[at : at + generator.randrange(1, 40)]
        elif kind == 3:
            damaged[at:at] = damaged[at : at + generator.randrange(1, 40)]
        else:
            damaged[at : at + 4] = generator.randbytes(4)
    return bytes(damaged)


def mutated(value: Any, generator: random.Random) -> Any:
    """Return a JSON value with one part replaced by something unexpected."""
    if isinstance(value, dict) and value and generator.random() < 0.85:
        name = generator.choice(list(value))
        others = {key: item for key, item in value.items() if key != name}
        if generator.random() < 0.2:
            return others
        return {**others, name: mutated(value[name], generator)}
    if isinstance(value, list) and value and generator.random() < 0.7:
        at = generator.randrange(len(value))
        return [*value[:at], mutated(value[at], generator), *value[at + 1 :]]
    return generator.choice(SCALARS)


def damaged_json(value: Any, generator: random.Random) -> bytes:
    kind = generator.random()
    if kind < 0.6:
        return json.dumps(mutated(value, generator)).encode()
    if kind < 0.9:
        return flipped(json.dumps(value).encode(), generator)
    return generator.choice(WRONG_JSON)


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{SEED} {request.node.name}")


def rejected(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> bool:
    """Return whether the call raised one of these errors. Any other error fails the test."""
    try:
        call()
    except kinds as error:
        assert str(error)
        return True
    return False


ROWS = [{"prompt": f"What is {i}? é", "answer": str(i), "id": i, "n": [i] * 3} for i in range(8)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def arrow_file(kind: str) -> bytes:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.ipc
    import pyarrow.parquet

    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    columns["chat"] = [[{"role": "user", "content": f"é{i}"}] for i in range(len(ROWS))]
    table, sink = pa.table(columns), pa.BufferOutputStream()
    if kind == ".parquet":
        pyarrow.parquet.write_table(table, sink, row_group_size=3)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return bytes(sink.getvalue().to_pybytes())


CONTENT: dict[str, Callable[[], bytes]] = {
    ".jsonl": lambda: jsonl(ROWS),
    ".json": lambda: json.dumps(ROWS).encode(),
    ".jsonl.gz": lambda: gzip.compress(jsonl(ROWS)),
    ".csv": lambda: b"prompt,answer\n" + b'"a, ""b""",2\n' * 8,
    ".parquet": lambda: arrow_file(".parquet"),
    ".arrow": lambda: arrow_file(".arrow"),
}


@pytest.mark.parametrize("extension", CONTENT)
def test_damaged_data_file_is_read_or_data_error(
    extension: str, tmp_path: Path, generator: random.Random
) -> None:
    content, outcomes = CONTENT[extension](), set()
    for number in inputs():
        path = tmp_path / f"{number}{extension}"
        wrong = number < len(WRONG_JSON) and extension in (".json", ".jsonl")
        path.write_bytes(WRONG_JSON[number] if wrong else flipped(content, generator))
        outcomes.add(rejected(DataError, lambda p=path: list(read_files([p]))))
        path.unlink()
    assert outcomes == {True, False} or extension == ".jsonl"  # its bad rows are reported singly


def test_any_row_is_prompt_or_data_error(tmp_path: Path, generator: random.Random) -> None:
    tokenizer, path = make_tokenizer(), tmp_path / "rows.jsonl"
    for _ in inputs(INPUTS // 3):
        rewrite(path, b"\n".join(damaged_json(row, generator) for row in ROWS))
        settings = DataSettings(path=str(path), on_bad_row=generator.choice(["fail", "skip"]))
        rejected(DataError, lambda s=settings: PromptSource(s, tokenizer, 0)[0])


def test_any_state_of_dataset_names_files_inside_it(
    tmp_path: Path, generator: random.Random
) -> None:
    state = {"_data_files": [{"filename": "data-0.jsonl"}], "_split": "train"}
    (tmp_path / "data-0.jsonl").write_bytes(jsonl(ROWS))
    for _ in inputs():
        rewrite(tmp_path / "state.json", damaged_json(state, generator))
        try:
            found = find_files((str(tmp_path),))
        except DataError:
            continue
        assert all(file.parent == tmp_path for file in found)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step_00000003"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


MANIFEST = {"schema": 2, "step": 3, "files": {"state.json": "0" * 64, "actor/x": "1" * 64}}
LEDGER = {"next_seq": 9, "outstanding": [7, 8], "trained": 6, "dropped": {"stale": 1}, "length": 0}
STATE = {"step": 3, "metrics_length": 0, "config": {"steps": 5}, "source": {}, "ledger": LEDGER}


def test_any_wrong_manifest_is_checkpoint_error(checkpoint: Path, generator: random.Random) -> None:
    for _ in inputs():
        rewrite(checkpoint / "manifest.json", damaged_json(MANIFEST, generator))
        assert rejected(CheckpointError, lambda: verify_checkpoint(checkpoint))


def test_any_state_of_run_is_resumed_or_checkpoint_error(
    checkpoint: Path, generator: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run_dir.latest_checkpoint", lambda root: checkpoint)
    config = load_config(values={"run_dir": str(checkpoint.parents[1])})
    for _ in inputs():
        rewrite(checkpoint / "state.json", damaged_json(STATE, generator))
        rejected(CheckpointError, lambda: recorded_config(checkpoint.parents[1]))
        rejected(CheckpointError, lambda: find_start(config, {"config": {"steps": 5}}))


def test_any_command_to_job_gets_reply(tmp_path: Path, generator: random.Random) -> None:
    async def add(count: int = 1) -> int:
        return 1 + count

    request = {"command": "add", "arguments": {"count": 2}}

    async def check() -> None:
        control = Control(tmp_path)
        async with control.serving({"add": add, "pause": lambda: add()}):
            for _ in inputs():
                reply = await control._reply(damaged_json(request, generator))
                assert reply.keys() <= {"value", "error"} and json.dumps(reply)

    asyncio.run(check())


def settings_text(generator: random.Random) -> Iterator[str]:
    names = ["steps", "data.path", "schedule.max_staleness", "model", "placement", "x", "", "train"]
    for _ in range(generator.randrange(1, 4)):
        value = generator.choice([str(scalar) for scalar in SCALARS] + ["9" * 5000, "[" * 3000])
        noise = "".join(generator.choice(string.printable) for _ in range(generator.randrange(6)))
        yield f"{generator.choice(names)}={generator.choice([value, noise, value + noise])}"


@pytest.mark.parametrize("kind", ["toml", "yaml"])
def test_any_recipe_and_any_setting_is_valid_or_config_error(
    kind: str, tmp_path: Path, generator: random.Random
) -> None:
    recipe = tmp_path / f"recipe.{kind}"
    text = b"model: tiny\nsteps: 3\ndata:\n  task: sort:3\nrollout:\n  temperature: 0.5\n"
    if kind == "toml":
        text = b'model = "tiny"\nsteps = 3\n[data]\ntask = "sort:3"\n[rollout]\ntop_p = 0.5\n'
    for _ in inputs(INPUTS // 2):
        rewrite(recipe, flipped(text, generator))
        rejected((ConfigError, DataError), lambda: load_config(recipe))
        settings = list(settings_text(generator))
        rejected((ConfigError, DataError), lambda s=settings: load_config(values={}, overrides=s))


SCRIPTS = ["python3 -m verl.trainer.main_ppo data.train_batch_size=$((N * 2)) a.b=[1,{c:2}]"]
SCRIPTS += ["a=" + "9" * 5000 + "\nb=$((a+1)) x.y=${b}", "$((" + "1+" * 3000 + "1))", "x.y=9" * 900]
SCRIPTS += ["x.y=" + "{a:" * 200, "x.y=${HOME:-${A}}", "~x.y", "+x.y='a b'"]


def test_any_script_of_verl_is_read_or_config_error(generator: random.Random) -> None:
    for number in inputs():
        text = SCRIPTS[number % len(SCRIPTS)].encode()
        damaged = flipped(text, generator) if number >= len(SCRIPTS) else text
        rejected(ConfigError, lambda d=damaged: read_script(d.decode(errors="replace")))
