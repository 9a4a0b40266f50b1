"""Commands to a running job through the socket in its run directory."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import control
from paceline.cli import app
from paceline.control import SOCKET, Control, send_command
from paceline.errors import ConfigError
from paceline.run import job_commands
from tests.fault_report import Fault

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


def paceline(folder: Path, *args: str) -> Any:
    """Run the command line while a job runs in the directory."""

    async def run() -> Any:
        async with job(folder):
            return await asyncio.to_thread(CliRunner().invoke, app, [*args])

    return asyncio.run(run())


@pytest.mark.parametrize("depth", [0, 10])
def test_workers_commands_work_when_path_of_run_directory_is_long(
    depth: int, tmp_path: Path
) -> None:
    folder = tmp_path.joinpath(*["a long directory name"] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    listed = paceline(folder, "workers", "list", str(folder))
    assert listed.exit_code == 0
    for word in ("rollout", "local", "live", "1,23", "16"):
        assert word in listed.stdout
    assert (
        '"tokens_per_s": 1234.5'
        in paceline(folder, "workers", "list", str(folder), "--json").stdout
    )
    added = paceline(folder, "workers", "add", str(folder), "-n", "2")
    assert "added rollout-0, rollout-1" in added.stdout
    rejected = paceline(folder, "workers", "add", str(folder), "-n", "3")
    assert rejected.exit_code == 2 and "no room for that many" in rejected.stderr
    assert not (folder / SOCKET).exists(), "the socket was left behind"


def test_send_command_fails_when_no_job_is_running(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / SOCKET))
    with pytest.raises(ConfigError, match="no job is running in"):
        send_command(tmp_path, "list")
    with pytest.raises(ConfigError, match="no job is running in"):
        send_command(tmp_path / "nowhere", "list")


def test_job_replaces_socket_of_killed_job_and_admits_only_its_owner(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / SOCKET))

    async def run() -> Any:
        async with job(tmp_path):
            assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600
            return await asyncio.to_thread(send_command, tmp_path, "list")

    assert asyncio.run(run()) == ROWS


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("fly", {}, "invalid command"),
        ("add", {"number": 1}, "add: missing a required argument"),
        ("break", {}, "break failed: .*no more processes"),
    ],
)
def test_send_command_fails_when_command_is_invalid_or_fails(
    command: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with job(tmp_path):
            with pytest.raises(ConfigError, match=message):
                await asyncio.to_thread(send_command, tmp_path, command, **arguments)

    asyncio.run(run())


def test_pending_command_fails_when_job_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with job(tmp_path) as control:
            pending = asyncio.create_task(asyncio.to_thread(send_command, tmp_path, "slow"))
            while not control._clients:
                await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="ended before it replied"):
            await pending

    asyncio.run(run())
    assert not caplog.records, "the job logged something"


def test_job_runs_and_warns_when_socket_cannot_be_created(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> str:
        async with job(tmp_path / "missing"):
            return "done"

    assert asyncio.run(run()) == "done"
    assert "cannot create the control socket" in caplog.text


def test_send_command_fails_when_job_is_starting_or_ending(tmp_path: Path) -> None:
    async def run() -> None:
        async with Control(tmp_path) as control:
            for _ in range(2):
                with pytest.raises(ConfigError, match="is starting or ending; try again"):
                    await asyncio.to_thread(send_command, tmp_path, "list")
                async with control.serving(COMMANDS):
                    assert await asyncio.to_thread(send_command, tmp_path, "list") == ROWS

    asyncio.run(run())


def test_send_command_times_out_when_job_is_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "REPLY_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as unresponsive:
        unresponsive.bind(str(tmp_path / SOCKET))
        unresponsive.listen()
        with pytest.raises(
            ConfigError, match=r"did not reply within 0\.1 s; check whether it is suspended"
        ):
            send_command(tmp_path, "list")


def test_send_command_times_out_when_queue_of_suspended_job_is_full(tmp_path: Path) -> None:
    with ExitStack() as stack:
        suspended = stack.enter_context(socket.socket(socket.AF_UNIX))
        suspended.bind(str(tmp_path / SOCKET))
        suspended.listen(1)
        with suppress(BlockingIOError):
            while True:  # earlier commands, for example those of paceline watch
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(tmp_path / SOCKET))
        with pytest.raises(ConfigError, match="check whether it is suspended"):
            send_command(tmp_path, "list", reply_timeout_s=0.1)


@pytest.mark.fault("G4", "70 clients of a job send garbage")
def test_job_serves_200_clients_when_others_send_garbage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    def send(data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as connection, suppress(ConnectionError):
            connection.connect(str(tmp_path / SOCKET))
            connection.sendall(data)

    async def run() -> None:
        async with job(tmp_path):
            requests = [asyncio.to_thread(send_command, tmp_path, "list") for _ in range(200)]
            garbage = [
                asyncio.to_thread(send, data)
                for data in (b"", b"{", b"\xff\n", b"[]\n", b"{}\n", b"x" * 200_000, b"null\n") * 10
            ]
            replies = await asyncio.gather(*requests, *garbage)
            assert replies[:200] == [ROWS] * 200

    asyncio.run(run())
    fault.fired()
    assert not caplog.records


def test_pause_takes_no_name_because_resume_would_not_know_it(tmp_path: Path) -> None:
    held: set[str] = set()

    class Rollouter:
        async def pause_rollout(self, who: str = "user") -> bool:
            held.add(who)
            return True

        async def resume_rollout(self, who: str = "user") -> bool:
            held.discard(who)
            return True

    fleet: Any = SimpleNamespace(describe=rows, add=add, remove=add)

    async def run() -> None:
        job: Any = Rollouter()
        async with Control(tmp_path) as control, control.serving(job_commands(fleet, job)):
            with pytest.raises(ConfigError, match="unexpected keyword argument 'who'"):
                await asyncio.to_thread(send_command, tmp_path, "pause", who="x")
            assert held == set()
            await asyncio.to_thread(send_command, tmp_path, "pause")
            assert held == {"user"}
            await asyncio.to_thread(send_command, tmp_path, "resume")
            assert held == set()

    asyncio.run(run())


@pytest.mark.fault("B6", "client of a job is silent")
def test_silent_client_is_dropped_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.1)

    def wait() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(tmp_path / SOCKET))
            return connection.recv(1)

    async def run() -> bytes:
        async with job(tmp_path):
            return await asyncio.to_thread(wait)

    assert asyncio.run(run()) == b""
    fault.fired()


def test_more_clients_than_allowed_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_CLIENTS", 3)
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 600)

    def wait() -> bytes:
        with ExitStack() as stack:
            clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
            for client in clients:
                client.settimeout(60)
                client.connect(str(tmp_path / SOCKET))
            return clients[3].recv(1)

    async def run() -> bytes:
        async with job(tmp_path):
            return await asyncio.to_thread(wait)

    assert asyncio.run(run()) == b""


def test_pause_prints_command_on_one_line_when_path_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "send_command", lambda *_, **__: None)
    run_dir = f"runs/{'x' * 100}"
    result = CliRunner().invoke(app, ["pause", run_dir])
    assert f"to continue: paceline resume {run_dir}\n" in result.output


def test_command_fails_when_job_ends_within_its_reply(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / SOCKET))
        listening.listen()

        def reply() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b'{"value": [')

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(ConfigError, match="ended before it replied"):
            send_command(tmp_path, "list")
        thread.join()
