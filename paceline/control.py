"""Talk to a running job: a socket in its run folder, one line of JSON to ask, one to answer.

Only the owner of the run folder can connect. The socket is there while the job runs.
"""

import asyncio
import json
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PacelineError

log = logging.getLogger(__name__)

SOCKET = "control.sock"
LONGEST = 100  # bytes of a socket's path that every system takes
REPLY_TIMEOUT_S = 600.0  # a worker that is added loads its model first

Command = Callable[..., Awaitable[Any]]


class Control:
    """The job's end. It is there as soon as the job is, and says so while there is nothing yet that
    could be commanded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands: Mapping[str, Command] = {}
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, commands: Mapping[str, Command]) -> AsyncIterator[None]:
        """What can be asked for, until it is over; who still waits for an answer then is told."""
        self._commands = commands
        try:
            yield
        finally:
            self._commands = {}
            await self._close_clients()

    async def __aenter__(self) -> "Control":
        listening = socket.socket(socket.AF_UNIX)
        try:
            (self._folder / SOCKET).unlink(
                missing_ok=True
            )  # of a run that was killed: this one holds the folder's lock
            with _short_path(self._folder) as path:
                listening.bind(path)
                os.chmod(path, 0o600)
        except OSError as error:
            listening.close()
            log.warning(
                "nobody can talk to this job: no socket can be made in %s (%s)", self._folder, error
            )
            return self
        self._server = await asyncio.start_unix_server(self._handle_client, sock=listening)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is None:
            return
        self._server.close()
        await self._close_clients()
        (self._folder / SOCKET).unlink(missing_ok=True)

    async def _close_clients(self) -> None:
        for task in list(self._clients):
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _handle_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task
        self._clients.add(task)
        try:
            answer = await self._answer(await reader.readline())
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass  # it did not wait for the answer, sent a line without an end, or we are closing
        finally:
            writer.close()
            self._clients.discard(task)

    async def _answer(self, line: bytes) -> dict[str, Any]:
        if not self._commands:
            return {
                "error": f"the job in {self._folder} is starting or ending; ask again in a moment"
            }
        try:
            request = json.loads(line)
            command = self._commands[request["command"]]
            arguments = request.get("arguments", {})
        except (ValueError, KeyError, TypeError):
            return {
                "error": f"not understood: {line[:80]!r}; the commands are {', '.join(self._commands)}"
            }
        try:
            return {"value": await command(**arguments)}
        except (PacelineError, TypeError) as error:
            return {"error": str(error)}
        except Exception as error:
            log.exception("%s failed", request["command"])
            return {"error": f"{request['command']} failed: {type(error).__name__}: {error}"}


def send_command(folder: Path, command: str, **arguments: Any) -> Any:
    """Ask the job that runs in `folder`. Raises what it refuses."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REPLY_TIMEOUT_S)
        try:
            with _short_path(folder) as path:
                connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise ConfigError(
                f"no job is running in {folder}; give the run folder of one that is"
            ) from None
        except PermissionError:
            raise ConfigError(
                f"the job in {folder} belongs to somebody else; only its owner can ask it"
            ) from None
        try:
            connection.sendall(
                json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
            )
            with connection.makefile("rb") as stream:
                line = stream.readline()
        except TimeoutError:
            raise ConfigError(
                f"the job in {folder} did not answer within {REPLY_TIMEOUT_S:g} s; is it stopped (Ctrl-Z)?"
            ) from None
        except ConnectionError:
            line = b""
    if not line:
        raise ConfigError(f"the job in {folder} ended before it could answer")
    answer = json.loads(line)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["value"]


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """A path to the socket that fits into an address: by way of a link if the folder's own is too
    long."""
    path = folder.resolve() / SOCKET
    if len(os.fsencode(path)) < LONGEST:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as near:
        link = Path(near) / "run"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield str(link / SOCKET)
