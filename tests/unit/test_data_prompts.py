"""Stream of prompts: order, random access, file formats, and errors that name file and row."""

import csv
import gzip
import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.data.files import ParsedRow, find_files, read_files
from paceline.data.prompts import DataSettings, PromptSource
from paceline.data.tiny import make_tokenizer
from paceline.errors import ConfigError, DataError
from tests.fault_report import Fault

TOKENIZER = make_tokenizer()


def write(file: Path, *rows: Any) -> str:
    """Write rows as JSON lines; bytes are written unchanged."""
    file.write_bytes(
        b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows)
    )
    return str(file)


def source(path: str, seed: int = 0, **settings: Any) -> PromptSource:
    return PromptSource(DataSettings(path=path, **settings), TOKENIZER, seed)


@given(size=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_every_epoch_has_every_row_once(size: int, seed: int, epoch: int) -> None:
    prompts = PromptSource(DataSettings(task="copy:9", limit=size), TOKENIZER, seed)
    uids = [prompts[epoch * size + i].uid for i in range(size)]
    assert sorted(uids) == sorted(f"copy:9:{i}" for i in range(size))


def test_order_depends_on_epoch_and_seed() -> None:
    def uids(seed: int, start: int) -> list[str]:
        prompts = PromptSource(DataSettings(task="copy", limit=50), TOKENIZER, seed)
        return [prompts[i].uid for i in range(start, start + 50)]

    assert uids(0, 0) == uids(0, 0)
    assert uids(0, 0) != uids(0, 50)
    assert uids(0, 0) != uids(1, 0)


def test_position_does_not_depend_on_earlier_reads() -> None:
    settings = DataSettings(task="sort", limit=7)
    walked, jumped = PromptSource(settings, TOKENIZER, 5), PromptSource(settings, TOKENIZER, 5)
    assert [walked[i] for i in range(100)][93] == jumped[93]


def test_rows_are_in_file_order_without_shuffling(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": f"p{i}"} for i in range(3)))
    prompts = source(path, shuffle=False)
    assert [prompts[i].row["prompt"] for i in range(5)] == ["p0", "p1", "p2", "p0", "p1"]
    assert prompts[1].uid == "a.jsonl:2"
    with pytest.raises(IndexError):
        prompts[-1]


def test_gsm8k_rows_work_with_prompt_key(tmp_path: Path) -> None:
    row = {
        "question": "Natalia sold 48 clips in April and half as many in May. How many?",
        "answer": "48/2=24, 48+24=72\n#### 72",
    }
    prompt = source(write(tmp_path / "gsm8k.jsonl", row), prompt_key="question")[0]
    assert "Natalia" in prompt.text
    assert prompt.row == row
    assert TOKENIZER.decode(prompt.tokens) == prompt.text


def test_parquet_and_jsonl_give_same_prompts(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(4)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    a, b = source(str(tmp_path / "a.parquet")), source(write(tmp_path / "a.jsonl", *rows))
    assert [(a[i].tokens, a[i].row) for i in range(4)] == [
        (b[i].tokens, b[i].row) for i in range(4)
    ]
    assert a[0].uid.startswith("a.parquet:")


def test_parquet_error_names_package_when_pyarrow_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r'pip install "paceline\[parquet\]"'):
        source(str(tmp_path / "a.parquet"))


def test_error_names_broken_parquet_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file"):
        source(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("wrong", [0x7FFFFFF0, -5], ids=["beyond the data", "negative"])
def test_arrow_file_with_wrong_offsets_is_error_and_no_crash(wrong: int, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.ipc

    file = tmp_path / "a.arrow"
    table = pyarrow.table({"prompt": ["a", "b", "c"]})
    with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as to:
        to.write_table(table)
    assert len(list(read_files([file]))) == 3
    whole, damaged = struct.pack("<4i", 0, 1, 2, 3), struct.pack("<4i", 0, 1, wrong, 3)
    assert whole in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(whole, damaged))
    with pytest.raises(DataError, match=r"a\.arrow is not a readable Arrow stream"):
        list(read_files([file]))


def test_path_may_be_list_or_pattern(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", {"prompt": "a"})
    write(tmp_path / "2.jsonl", {"prompt": "b"})
    assert len(source(str(tmp_path / "*.jsonl"))) == 2
    both = DataSettings(path=(first, str(tmp_path / "[12].jsonl")))
    assert len(PromptSource(both, TOKENIZER, 0)) == 2


def test_rows_of_files_with_same_name_are_kept_apart(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.jsonl", {"prompt": name})
    assert len(source(str(tmp_path / "*/a.jsonl"))) == 2


GOOD = {"prompt": "fine"}
BAD_ROWS = {
    "missing key": ({"question": "x"}, r"no 'prompt' \(data.prompt_key\); the row has 'question'"),
    "number": ({"prompt": 3}, "'prompt' is int; expected text or a list of chat messages"),
    "null": ({"prompt": None}, "'prompt' is NoneType"),
    "empty": ({"prompt": " \n"}, "the text is empty"),
    "no messages": ({"prompt": []}, "the list of messages is empty"),
    "bad message": ({"prompt": [{"role": "user"}]}, "message 1 is not"),
    "answered": (
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "the last message has the role assistant",
    ),
    "not JSON": (b'{"prompt": "x"\n', "not JSON"),
    "not an object": ([1, 2], "expected a JSON object, got list"),
    "not UTF-8": (b'{"prompt": "\xff"}\n', r"not UTF-8 \(byte 13 of the line\)"),
    "lone surrogate": (b'{"prompt": "\\ud800"}\n', "lone surrogate"),
    "too long": ({"prompt": "x" * 600}, "the prompt has 601 tokens; data.max_prompt_length = 512"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.fault("D3", "bad row: {kind}")
def test_error_names_file_and_number_of_bad_row(kind: str, tmp_path: Path, fault: Fault) -> None:
    row, message = BAD_ROWS[kind]
    path = write(tmp_path / "a.jsonl", GOOD, row, GOOD)
    with pytest.raises(
        DataError, match=rf"1 of 3 rows of .*a\.jsonl cannot be used:\n  a\.jsonl:2: .*{message}"
    ):
        source(path)
    skipping = source(path, on_bad_row="skip")
    assert len(skipping) == 2
    assert [bad.where for bad in skipping.bad_rows] == ["a.jsonl:2"]
    fault.fired()


@pytest.mark.fault("D3", "rows with the same id")
def test_rows_with_same_id_get_unique_uid(tmp_path: Path, fault: Fault) -> None:
    path = write(
        tmp_path / "a.jsonl", GOOD | {"id": "q1"}, GOOD | {"id": "q2"}, GOOD | {"id": "q1"}
    )
    prompts = source(path, shuffle=False)
    assert [prompts[i].uid for i in range(3)] == ["q1", "q2", "q1 (a.jsonl:3)"]
    fault.fired()


def test_no_row_is_lost_when_made_up_uid_is_id_of_another(tmp_path: Path) -> None:
    ids = ["a (rows.jsonl:3)", "a", "a", "a", "a (rows.jsonl:4)", 1, "1", None, "rows.jsonl:8"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "id": i}) + "\n" for i in ids))
    source = PromptSource(DataSettings(path=str(path), shuffle=False), TOKENIZER, 0)
    assert len(source) == len({source[seq].uid for seq in range(len(ids))}) == len(ids)


@pytest.mark.parametrize("name", ["../secret.jsonl", "/etc/secret.jsonl", "x/../../secret.jsonl"])
@pytest.mark.fault("G2", "dataset names a file outside: {name}")
def test_saved_dataset_reads_only_files_of_its_directory(
    name: str, tmp_path: Path, fault: Fault
) -> None:
    (tmp_path / "secret.jsonl").write_text('{"prompt": "a secret"}\n')
    saved = tmp_path / "saved"
    (saved / "x").mkdir(parents=True)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match=r"does not describe a saved dataset.*is not the name of"):
        find_files((str(saved),))
    fault.fired()


@pytest.mark.fault("D3", "data file is a pipe")
def test_pipe_is_rejected_instead_of_read(tmp_path: Path, fault: Fault) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="is not a regular file"):
        find_files((str(tmp_path / "rows.jsonl"),))
    fault.fired()


@pytest.mark.fault("D3", "integer with 5000 digits")
def test_row_is_bad_when_integer_has_thousands_of_digits(tmp_path: Path, fault: Fault) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "n": ' + "9" * 5000 + "}\n")
    assert [bool(read.problem) for read in read_files([path])] == [False, True]
    fault.fired()


def test_row_without_id_gets_location_as_uid(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD | {"id": None}, GOOD | {"id": None}, GOOD)
    assert {source(path)[i].uid for i in range(3)} == {"a.jsonl:1", "a.jsonl:2", "a.jsonl:3"}


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.csv.gz", "saved"])
def test_file_formats_give_same_rows(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": f'say "{i}",\nplease 🎉', "answer": str(i)} for i in range(3)]
    lines = io.StringIO(newline="")
    table = csv.DictWriter(lines, ["prompt", "answer"], delimiter="\t" if ".tsv" in name else ",")
    table.writeheader()
    table.writerows(rows)
    text = lines.getvalue() if "sv" in name else "\r\n".join(map(json.dumps, rows))
    if name == "a.json":
        text = json.dumps(rows)
    content = b"\xef\xbb\xbf" + text.encode()  # Windows programs write a byte order mark
    if name == "saved":
        save_dataset(tmp_path / name, rows)
    else:
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    prompts = source(str(tmp_path / name), shuffle=False)
    assert [prompts[i].row for i in range(len(prompts))] == rows
    assert prompts[2].uid.endswith(":3")


def save_dataset(directory: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    directory.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    with (
        pyarrow.OSFile(str(directory / "data-00000-of-00001.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (directory / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"})
    )


BROKEN = {
    "a.json": (b'[{"prompt": "x"}', "is not a JSON array of rows"),
    "a.csv": (
        b"prompt,answer\nx,1\ny\n",
        r"1 of 2 rows .*\n  a.csv:2: does not have the 2 fields of the first line",
    ),
    "a.tsv": (b'prompt\n"x\n', "not a readable CSV file"),
    "a.jsonl.gz": (gzip.compress(b'{"prompt": "x"}\n')[:-9], "not a complete gzip file"),
    "b.jsonl.gz": (b'{"prompt": "x"}\n', "cannot read .*b.jsonl.gz"),
    "a.arrow": (b"no arrow", "not a readable Arrow stream"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.fault("D3", "broken data file {name}")
def test_error_names_broken_file(name: str, tmp_path: Path, fault: Fault) -> None:
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        source(str(tmp_path / name))
    fault.fired()


def test_missing_column_is_reported_when_row_of_csv_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nx,1\ny,2,3\n")
    with pytest.raises(DataError, match=r"columns found: question, answer\. Select the prompt"):
        source(str(tmp_path / "a.csv"))


def test_missing_column_is_reported_when_names_are_not_text() -> None:
    reads = [ParsedRow("row 1", {1: "x"})]  # type: ignore[dict-item]
    with pytest.raises(DataError, match="columns found: 1"):
        PromptSource(DataSettings(), TOKENIZER, 0, ("rows", reads))


def test_answer_key_selects_column_or_nested_field(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", GOOD | {"solution": "7", "reward_model": {"ground_truth": 8}}
    )
    assert source(path, answer_key="solution")[0].row["answer"] == "7"
    assert source(path, answer_key="reward_model.ground_truth")[0].row["answer"] == 8
    with pytest.raises(
        DataError,
        match=r"a.jsonl:1: no 'reward_model.truth' \(data.answer_key\); "
        "the row has 'prompt', 'solution'",
    ):
        source(path, answer_key="reward_model.truth")


def test_error_lists_columns_when_prompt_column_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"question": "x", "answer": 1}] * 9)
    with pytest.raises(
        DataError,
        match=r"columns found: question, answer\. Select .* data\.prompt_key=question$",
    ):
        source(path)
    with pytest.raises(DataError, match=r"no column 'q' .*data\.prompt_key=question$"):
        source(path, prompt_key="q", on_bad_row="skip")


def test_extension_may_be_upper_case(tmp_path: Path) -> None:
    assert len(source(write(tmp_path / "A.JSONL", GOOD))) == 1


def test_error_lists_first_bad_rows_and_counts_rest(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 600}, {"prompt": ""}] * 10
    with pytest.raises(DataError) as caught:
        source(write(tmp_path / "a.jsonl", GOOD, *rows))
    assert "20 of 21 rows" in str(caught.value)
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:6]] == [
        f"a.jsonl:{i}:" for i in range(2, 7)
    ]
    assert "... and 15 more" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
@pytest.mark.fault("D5", "data file without rows")
def test_file_without_rows_is_rejected(content: bytes, tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl"):
        source(str(tmp_path / "a.jsonl"))
    fault.fired()


@pytest.mark.fault("D5", "every row is bad")
def test_error_is_raised_when_all_rows_are_skipped(tmp_path: Path, fault: Fault) -> None:
    with pytest.raises(DataError, match="no usable rows"):
        source(write(tmp_path / "a.jsonl", {"prompt": ""}), on_bad_row="skip")
    fault.fired()


@pytest.mark.parametrize("name", ["nowhere.jsonl", "*.parquet"])
def test_error_names_missing_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file at"):
        source(str(tmp_path / name))


def test_directory_is_rejected_with_pattern_for_its_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a directory"):
        source(str(tmp_path))
    save_dataset(tmp_path / "set" / "train", [GOOD])
    with pytest.raises(
        DataError, match=r"is a directory; expected its files, .* '.*/set/train/\*\.arrow'"
    ):
        source(str(tmp_path / "set"))


def test_dataset_with_several_splits_is_rejected(tmp_path: Path) -> None:
    save_dataset(tmp_path / "set" / "train", [GOOD])
    (tmp_path / "set" / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"several splits; select one: .*/set/train$"):
        source(str(tmp_path / "set"))


def test_unknown_extension_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read \.txt; expected one of \.jsonl, .*\.parquet"):
        source(write(tmp_path / "a.txt", GOOD))


def test_fingerprint_changes_with_rows(tmp_path: Path) -> None:
    one = source(write(tmp_path / "a.jsonl", GOOD | {"answer": "1"})).fingerprint
    assert one == source(write(tmp_path / "a.jsonl", GOOD | {"answer": "1"})).fingerprint
    assert one != source(write(tmp_path / "a.jsonl", GOOD | {"answer": "2"})).fingerprint


FINGERPRINTS = """
from paceline.data.prompts import DataSettings
from paceline.data.source import open_source
from paceline.data.tiny import make_tokenizer
class Meta: pass
row = {"prompt": "a", "tags": {"w", "x", "y", "z"}, "meta": Meta(), 7: {1: "i", "k": (Meta(),)}}
keys = {frozenset("wxyz"): 1, ("a", frozenset("wxyz")): 2}
for rows in ([row], [row | {"keys": keys}], iter([row]), iter([row | {"keys": keys}])):
    print(open_source(DataSettings(), make_tokenizer(), 0, rows).fingerprint)
"""


def test_fingerprint_is_same_in_every_process_for_sets_and_objects() -> None:
    first, second = (
        subprocess.run(
            [sys.executable, "-c", f"junk = {junk}{FINGERPRINTS}"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed, junk in (("1", "[]"), ("2", "[object() for _ in range(99_999)]"))
    )
    assert first == second and len(first) == 4, "of a list and a stream, without and with odd keys"


def test_invalid_data_settings_are_rejected() -> None:
    with pytest.raises(
        ValidationError, match=r"task = 'sort:5' and path = 'a\.jsonl' are both set"
    ):
        DataSettings(task="sort", path="a.jsonl")
    with pytest.raises(ValidationError, match="did you mean 'sort'"):
        DataSettings(task="srt")
    with pytest.raises(ConfigError, match=r"set data\.task .*, data\.path"):
        PromptSource(DataSettings(), TOKENIZER, 0)


def test_separator_of_csv_is_reported_when_extension_means_another(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt;answer\nx;1\n")
    with pytest.raises(DataError, match=r"single field 'prompt;answer'.* instead of ';'"):
        source(str(tmp_path / "a.csv"))


def test_separator_of_csv_may_be_in_quoted_name_of_single_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"prompt, in English"\nx\n')
    assert len(source(str(tmp_path / "a.csv"), prompt_key="prompt, in English")) == 1
