"""Talking to a running job through its folder, however deep that lies."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import control
from paceline.cli import app
from paceline.control import SOCKET, Control, send_command
from paceline.errors import ConfigError

ROWS = [
    {
        "name": "rollout",
        "node": "local",
        "incarnation": 3,
        "state": "live",
        "version": 7,
        "load": 16,
        "tokens_per_s": 1234.5,
    }
]


async def rows() -> list[dict[str, Any]]:
    return ROWS


async def add(count: int) -> list[str]:
    if count > 2:
        raise ConfigError("no room for that many")
    return [f"rollout-{number}" for number in range(count)]


async def slow() -> None:
    await asyncio.sleep(3600)


async def breaks() -> None:
    raise OSError(11, "no more processes")


COMMANDS = {"list": rows, "add": add, "slow": slow, "break": breaks}


@asynccontextmanager
async def job(folder: Path) -> AsyncIterator[Control]:
    async with Control(folder) as control, control.serving(COMMANDS):
        yield control


def talk(folder: Path, *args: str) -> Any:
    """The command line's answer while a job runs in the folder."""

    async def run() -> Any:
        async with job(folder):
            return await asyncio.to_thread(CliRunner().invoke, app, [*args])

    return asyncio.run(run())


@pytest.mark.parametrize("depth", [0, 10])
def test_workers_are_listed_added_and_refused_in_words_in_a_folder_of_any_length(
    depth: int, tmp_path: Path
) -> None:
    folder = tmp_path.joinpath(*["a rather long name"] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    listed = talk(folder, "workers", "list", str(folder))
    assert listed.exit_code == 0 and all(
        word in listed.stdout for word in ("rollout", "local", "live", "1,23", "16")
    )
    assert '"tokens_per_s": 1234.5' in talk(folder, "workers", "list", str(folder), "--json").stdout
    assert (
        "added rollout-0, rollout-1"
        in talk(folder, "workers", "add", str(folder), "-n", "2").stdout
    )
    refused = talk(folder, "workers", "add", str(folder), "-n", "3")
    assert refused.exit_code == 2 and "no room for that many" in refused.stderr
    assert not (folder / SOCKET).exists(), "nothing is left behind"


def test_the_socket_of_a_killed_job_is_replaced_and_only_the_owner_can_connect(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / SOCKET))
    with pytest.raises(ConfigError, match="no job is running in"):
        send_command(tmp_path, "list")
    with pytest.raises(ConfigError, match="no job is running in"):
        send_command(tmp_path / "nowhere", "list")

    async def run() -> Any:
        async with job(tmp_path):
            assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600
            return await asyncio.to_thread(send_command, tmp_path, "list")

    assert asyncio.run(run()) == ROWS


@pytest.mark.parametrize(
    ("command", "arguments", "complaint"),
    [
        ("fly", {}, "not understood"),
        ("add", {"much": 1}, "unexpected keyword"),
        ("break", {}, "break failed: .*no more processes"),
    ],
)
def test_what_is_not_understood_is_said(
    command: str, arguments: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with job(tmp_path):
            with pytest.raises(ConfigError, match=complaint):
                await asyncio.to_thread(send_command, tmp_path, command, **arguments)

    asyncio.run(run())


def test_a_job_that_ends_does_not_wait_for_who_asks_and_tells_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with job(tmp_path) as control:
            asking = asyncio.create_task(asyncio.to_thread(send_command, tmp_path, "slow"))
            while not control._clients:
                await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="ended before it could answer"):
            await asking

    asyncio.run(run())
    assert not caplog.records, "and makes no noise of it"


def test_a_folder_without_sockets_does_not_stop_a_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> str:
        async with job(tmp_path / "dead"):
            return "done"

    assert asyncio.run(run()) == "done"
    assert "nobody can talk to this job" in caplog.text


def test_a_job_that_is_starting_or_ending_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        async with Control(tmp_path) as control:
            for _ in range(2):
                with pytest.raises(ConfigError, match="is starting or ending; ask again"):
                    await asyncio.to_thread(send_command, tmp_path, "list")
                async with control.serving(COMMANDS):
                    assert await asyncio.to_thread(send_command, tmp_path, "list") == ROWS

    asyncio.run(run())


def test_a_job_that_is_stopped_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "REPLY_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / SOCKET))
        frozen.listen()
        with pytest.raises(ConfigError, match=r"did not answer within 0\.1 s; is it stopped"):
            send_command(tmp_path, "list")


def test_garbage_half_lines_and_hundreds_who_ask_at_once_disturb_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def send(data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as connection, suppress(ConnectionError):
            connection.connect(str(tmp_path / SOCKET))
            connection.sendall(data)

    async def run() -> None:
        async with job(tmp_path):
            asked = [asyncio.to_thread(send_command, tmp_path, "list") for _ in range(200)]
            noise = [
                asyncio.to_thread(send, data)
                for data in (b"", b"{", b"\xff\n", b"[]\n", b"{}\n", b"x" * 200_000, b"null\n") * 10
            ]
            answers = await asyncio.gather(*asked, *noise)
            assert answers[:200] == [ROWS] * 200

    asyncio.run(run())
    assert not caplog.records
