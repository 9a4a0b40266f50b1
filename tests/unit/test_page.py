"""The page of a run: what it reads, what its server rejects, and that texts stay texts."""

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.control import Control
from paceline.errors import CheckpointError, ConfigError
from paceline.line_file import encode_line
from paceline.observe.distributions import NAME as DISTRIBUTIONS
from paceline.observe.distributions import Distributions, length_bin
from paceline.observe.token_details import MAX_TOKENS, TokenDetails, characters
from paceline.page import report
from paceline.page.document import document, embedded
from paceline.page.reader import RunReader
from paceline.page.report import MAX_BYTES, spread_groups, try_report, write_report
from paceline.page.server import PageServer
from paceline.types import Completion, Finish, Group, Prompt, Trajectory, Turn
from tests.fault_report import Fault
from tests.pages import append, group, metrics, write_run

HOSTILE = (
    '</script><script>document.title = "taken"</script><!-- \x1b[31mred\x1b[0m \u2028 & \ud800'
)


def data_of(html: str) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


@contextmanager
def serving(*run_dirs: Path) -> Iterator[PageServer]:
    with PageServer(run_dirs) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: PageServer, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers={"Host": host} if host else {})
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, content


def test_reader_returns_only_new_rows(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    reader = RunReader(run_dir)
    reader.update()
    first = reader.since(-1, {})
    assert first["metrics"]["step"] == [1, 2, 3] and len(first["samples"]) == 3
    append(run_dir, "metrics", metrics(4) | {"train/new": 1.0})
    reader.update()
    news = reader.since(first["epoch"], {"metrics": 3, "distributions": 3, "samples": 3})
    assert news["metrics"]["step"] == [4] and news["metrics"]["train/new"] == [1.0]
    assert news["samples"] == [] and news["distributions"] == []
    assert reader.since(first["epoch"], {})["metrics"]["train/new"] == [None, None, None, 1.0]


def test_reader_waits_for_end_of_incomplete_line(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 2)
    reader = RunReader(run_dir)
    line = encode_line(metrics(3))
    for part, expected in ((b"", 2), (line[:50], 2), (line[50:], 3)):
        with (run_dir / "metrics.jsonl").open("ab") as file:
            file.write(part)
        reader.update()
        assert len(reader.since(-1, {})["metrics"]["step"]) == expected


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_reader_starts_over_when_resumed_run_replaced_steps(tmp_path: Path, steps: int) -> None:
    run_dir = write_run(tmp_path / "run", 5)
    reader = RunReader(run_dir)
    reader.update()
    epoch = reader.since(-1, {})["epoch"]
    path = run_dir / "metrics.jsonl"
    path.write_bytes(
        b"".join(encode_line(metrics(step) | {"x": 1}) for step in range(1, steps + 1))
    )
    reader.update()
    found = reader.since(epoch, {"metrics": 5})
    assert found["epoch"] != epoch and found["metrics"]["step"] == list(range(1, steps + 1))


def test_reader_finds_group_by_text_of_any_case(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 4, groups=2)
    odd = group(5, 0, 1)
    odd["completions"][0]["turns"] = [{"prompt": "tool says ÄPFEL", "text": "x", "reward": 0}]
    append(run_dir, "samples", odd)
    reader = RunReader(run_dir)
    reader.update()
    assert reader.search("QUESTION 3.1") == [5]
    assert reader.search("äpfel") == [8] and reader.search("nowhere") == []
    found = reader.group(8)
    assert found and found["step"] == 5 and reader.group(9) is None


def test_reader_skips_damaged_samples(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 2)
    for row in ({"step": 3}, {"step": 3, "completions": 7}, {"completions": [{}]}):
        append(run_dir, "samples", row)
    append(run_dir, "samples", group(3, 0, 2))
    reader = RunReader(run_dir)
    reader.update()
    assert [row[0] for row in reader.since(-1, {})["samples"]] == [1, 2, 3]
    assert len(spread_groups(run_dir / "samples.jsonl", 10**6)) == 3


def test_reader_hides_secrets_in_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    run_dir = write_run(tmp_path / "run", 1, reward={"url": "https://x/?key=hunter2hunter2"})
    assert "hunter2" not in str(RunReader(run_dir).description())


def test_resumed_run_that_died_has_stopped_and_no_summary(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 2)
    append(run_dir, "metrics", metrics(3))
    reader = RunReader(run_dir)
    reader.update()
    found = reader.description()
    assert (found["state"], found["summary"]) == ("stopped", {})


def test_reader_lists_workers_of_running_job_only(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    worker = {"name": "rollout-0", "state": "live", "tokens_per_s": 12.5}

    async def list_workers() -> list[dict[str, Any]]:
        return [worker]

    async def descriptions() -> list[dict[str, Any]]:
        reader = RunReader(run_dir)
        async with Control(run_dir) as control:
            starting = await asyncio.to_thread(reader.description)
            async with control.serving({"list": list_workers}):
                running = await asyncio.to_thread(reader.description)
        return [starting, running, reader.description()]

    found = asyncio.run(descriptions())
    assert [row["state"] for row in found] == ["running", "running", "finished"]
    assert [row["workers"] for row in found] == [[], [worker], []]
    assert found[1]["summary"] == {}  # that of an earlier part of the run


def test_reader_fails_without_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a run directory"):
        RunReader(tmp_path / "nothing")


@pytest.mark.fault("G6", "script in a prompt and a completion of the HTML report")
def test_text_cannot_leave_data_of_report(tmp_path: Path, fault: Fault) -> None:
    run_dir = write_run(tmp_path / "run", 2)
    row = group(3, 0, 1)
    row["prompt"] = row["completions"][0]["text"] = HOSTILE
    append(run_dir, "samples", row)
    write_report([run_dir], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert html.count("<script") == 2 and html.count("</script>") == 2
    (run,) = data_of(html)["runs"]
    assert run["groups"][2]["completions"][0]["text"] == HOSTILE
    fault.fired()


def test_report_allows_no_network_and_no_other_script() -> None:
    html = document({"runs": []})
    assert "connect-src 'none'" in html and "default-src 'none'" in html
    assert "unsafe-inline" not in html and not re.search(r'(src|href)="(?!data:)', html)
    assert "connect-src 'self'" in document()


def test_data_has_null_for_numbers_that_json_lacks() -> None:
    assert json.loads(embedded({"a": [1.0, float("nan")]})) == {"a": [1.0, None]}


def test_report_of_long_run_is_small_and_covers_all_steps(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 600, completions=2)
    short = {"METRICS_BYTES": 20_000, "DISTRIBUTIONS_BYTES": 9_000, "SAMPLES_BYTES": 30_000}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in short.items():
            patch.setattr(report, name, value)
        write_report([run_dir], tmp_path / "report.html")
    (run,) = data_of((tmp_path / "report.html").read_text())["runs"]
    for name, limit in (("metrics", 20_000), ("distributions", 9_000), ("groups", 30_000)):
        assert limit / 3 < len(embedded(run[name])) < 1.1 * limit
    assert run["thinned"] > 1 and run["metrics"]["step"][-1] == 600
    total = sum(sum(row["trained"]["staleness"].values()) for row in run["distributions"])
    assert total == 600 * 100
    steps = [row["step"] for row in run["groups"]]
    assert min(steps) < 100 and max(steps) > 500 and len(set(steps)) == len(steps)


def test_report_stays_small_when_texts_need_escapes(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    for step in range(2, 60):
        row = group(step, 0, 1)
        row["completions"][0]["text"] = "<" * 15_000
        append(run_dir, "samples", row)
    write_report([run_dir], tmp_path / "report.html")
    assert 10**6 < (tmp_path / "report.html").stat().st_size < MAX_BYTES


def test_report_command_writes_one_file_for_all_runs(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, 2)) for name in ("one", "two")]
    result = CliRunner().invoke(app, ["report", *runs])
    assert result.exit_code == 0 and "bytes" in result.output
    found = data_of((tmp_path / "one" / "report.html").read_text())["runs"]
    assert [run["name"] for run in found] == ["one", "two"]
    for arguments in ([str(tmp_path / "no")], [*runs, "--output", str(tmp_path / "no" / "x.html")]):
        result = CliRunner().invoke(app, ["report", *arguments])
        assert result.exit_code == CheckpointError.exit_code


def test_report_command_writes_nothing_into_directory_that_is_no_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 1)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == CheckpointError.exit_code and "has no settings.json" in result.output
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["x.tmp", "x"])
def test_report_leaves_other_files_alone(tmp_path: Path, name: str) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    (tmp_path / "x.tmp").write_text("old")
    write_report([run_dir], tmp_path / name)
    assert (tmp_path / name).read_text().startswith("<!doctype html>")
    assert name == "x.tmp" or (tmp_path / "x.tmp").read_text() == "old"


def test_report_command_fails_when_output_is_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", str(run_dir), "--output", "."])
    assert result.exit_code == CheckpointError.exit_code


def test_report_that_fails_is_only_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    (run_dir / ".report.html.tmp").mkdir()
    try_report(run_dir)
    assert "report.html was not written" in caplog.text and "paceline report" in caplog.text


def test_server_returns_page_and_data(tmp_path: Path) -> None:
    run_dirs = [write_run(tmp_path / "one", 3), write_run(tmp_path / "two", 2)]
    with serving(*run_dirs) as server:
        base = f"/{server.token}/"
        assert server.url.endswith(base)
        status, content = get(server, base)
        assert status == 200 and content.startswith(b"<!doctype html>")
        assert json.loads(get(server, f"{base}runs")[1]) == ["one", "two"]
        data = json.loads(get(server, f"{base}data?run=1&epoch=-1")[1])
        assert data["metrics"]["step"] == [1, 2] and data["state"] == "finished"
        assert (
            get(server, f"{base}data?run=0&epoch=0")[0] == 200
        )  # groups are known once they are listed
        assert json.loads(get(server, f"{base}group?run=0&group=2")[1])["step"] == 3
        assert json.loads(get(server, f"{base}search?run=0&text=question+2.0")[1]) == [1]
        for path in ("group?run=0&group=99", "data?run=7", "data?run=-1", "data", "data?run=x"):
            assert get(server, base + path)[0] == 404


def test_server_rejects_other_hosts_and_tokens(tmp_path: Path) -> None:
    with serving(write_run(tmp_path / "run", 1)) as server:
        base = f"/{server.token}/"
        assert get(server, base, f"localhost:{server.server_port}")[0] == 200
        assert get(server, base, "evil.example")[0] == 403  # DNS rebinding
        for path in ("/", "/runs", "/wrong/", "/wrong/runs", f"{base}../runs", "//", "//[", "*"):
            assert get(server, path)[0] == 403


def test_server_says_which_port_is_taken(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    with serving(run_dir) as server, pytest.raises(ConfigError, match=r"--port .*cannot listen"):
        PageServer([run_dir], server.server_port)


# --- what the page needs in the files ---


def sample(tokens: str, version: int, reward: float) -> Trajectory:
    size = len(tokens)
    ids = np.array([ord(c) for c in tokens], np.int32)
    versions = np.full(size, version, np.int32)
    completion = Completion(ids, np.full(size, -0.5, np.float32), versions, Finish.STOP)
    return Trajectory((Turn((1,), completion),), tokens, reward=reward)


def test_distributions_count_each_kind_until_its_step(tmp_path: Path) -> None:
    made = Group(0, Prompt("a", (1,), "q", {}), (sample("abc", 1, 0.5), sample("ab", 2, 1)), 0, 0)
    writer = Distributions(tmp_path, 0)
    writer.add("generated", [made, made], 2)
    writer.add("dropped", [made], 4)
    writer.step_done(3, [made])
    writer.step_done(4, [])
    writer.close()
    first, second = (
        json.loads(line) for line in (tmp_path / DISTRIBUTIONS).read_text().split("\n")[:2]
    )
    assert first["generated"]["length"] == {"3": 2, "2": 2}
    assert first["trained"]["staleness"] == {"1": 1, "0": 1}
    assert first["dropped"]["staleness"] == {"3": 1, "2": 1}
    assert first["trained"]["reward"] == {"0.5": 1, "1": 1}
    assert "generated" not in second
    Distributions(tmp_path, 3).close()  # a run that resumes from step 3
    assert len((tmp_path / DISTRIBUTIONS).read_text().splitlines()) == 1


def test_length_bins_grow_with_length() -> None:
    assert [length_bin(n) for n in (0, 8, 9, 11, 17, 31, 1000)] == [0, 8, 8, 10, 16, 28, 896]


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("ab c", ["ab", " c"], [2, 2]),
        ("ab c", ["ab", "c"], [2, 2]),  # decoded alone, the token lost its space
        ("ab", ["ab", "", "<end>"], [2, 0, 0]),  # a special token after the text
        ("ab", ["x", "b"], None),
        ("", ["x"], [0]),
    ],
)
def test_characters_divide_text_into_tokens(
    text: str, pieces: list[str], expected: list[int] | None
) -> None:
    assert characters(text, pieces) == expected


def test_token_details_are_bounded_and_join_parts_of_characters() -> None:
    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def details(content: bytes) -> dict[str, Any]:
        ids = np.frombuffer(content, np.uint8).astype(np.int32)
        versions = np.arange(len(ids), dtype=np.int32) // 2
        made = Completion(ids, np.full(len(ids), -0.123, np.float32), versions, Finish.STOP)
        return TokenDetails(decode).of(made, content.decode())

    found = details("aé b".encode())
    assert found["token_characters"] == [1, 1, 0, 1, 1]
    assert found["logprobs"] == [-0.12] * 5 and found["versions"] == [[0, 2], [1, 2], [2, 1]]
    assert len(details(b"x" * 2000)["logprobs"]) == MAX_TOKENS
    assert details(b"") == {}
