"""Commands to a running job, for example `paceline pause`: a socket in its run directory, one line
of JSON per command and one per reply.

Only the owner of the run directory can connect. The socket exists while the job runs.
"""

import asyncio
import inspect
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PacelineError

log = logging.getLogger(__name__)

SOCKET = "control.sock"
MAX_CLIENTS = 512  # connections at the same time
REQUEST_TIMEOUT_S = 10.0  # for a client to send its command
MAX_PATH = 100  # bytes of a socket's path that every system accepts
RETRY_S = 0.05  # to connect to a job whose queue is full
REPLY_TIMEOUT_S = 600.0  # `add` replies when the new worker has loaded its model

Command = Callable[..., Awaitable[Any]]


class Control:
    """The job's socket. Outside of `serving`, it replies with an error to all commands."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._commands: Mapping[str, Command] = {}
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, commands: Mapping[str, Command]) -> AsyncIterator[None]:
        """Accept these commands. On exit, commands that are still running fail."""
        self._commands = commands
        try:
            yield
        finally:
            self._commands = {}
            await self._close_clients()

    async def __aenter__(self) -> "Control":
        listening = socket.socket(socket.AF_UNIX)
        try:
            # A killed run may have left its socket; this run holds the lock of the directory.
            (self._run_dir / SOCKET).unlink(missing_ok=True)
            with _short_path(self._run_dir) as path:
                listening.bind(path)
                os.chmod(path, 0o600)
                self._bound = os.stat(path)
        except OSError as error:
            listening.close()
            log.warning(
                "cannot create the control socket in %s (%s); paceline pause, resume and workers "
                "will not work for this run",
                self._run_dir,
                error,
            )
            return self
        self._server = await asyncio.start_unix_server(self._handle_client, sock=listening)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is None:
            return
        self._server.close()
        await self._close_clients()
        path = self._run_dir / SOCKET
        # If the directory was replaced during the run, its socket is that of another run.
        if path.exists() and os.path.samestat(path.stat(), self._bound):
            path.unlink(missing_ok=True)

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
            if len(self._clients) > MAX_CLIENTS:
                return
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await reader.readline()
            reply = await self._reply(line)
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # the client left, was silent, sent a line without an end, or the job is ending
        finally:
            writer.close()
            self._clients.discard(task)

    async def _reply(self, line: bytes) -> dict[str, Any]:
        if not self._commands:
            return {"error": f"the job in {self._run_dir} is starting or ending; try again later"}
        try:
            request = json.loads(line)
            command = self._commands[request["command"]]
            arguments = request.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            known = ", ".join(self._commands)
            return {"error": f"invalid command: {line[:80]!r}; expected one of {known}"}
        try:
            inspect.signature(command).bind(**arguments)
        except TypeError as error:
            return {"error": f"{request['command']}: {error}"}
        try:
            return {"value": await command(**arguments)}
        except PacelineError as error:
            return {"error": str(error)}
        except Exception as error:
            log.exception("%s failed", request["command"])
            return {"error": f"{request['command']} failed: {type(error).__name__}: {error}"}


def send_command(
    run_dir: Path, command: str, *, reply_timeout_s: float | None = None, **arguments: Any
) -> Any:
    """Send a command to the job in `run_dir`, and return its reply or raise its error."""
    reply_timeout_s = reply_timeout_s or REPLY_TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(reply_timeout_s)
        try:
            with _short_path(run_dir) as path:
                _connect(connection, path, reply_timeout_s)
            connection.sendall(
                json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
            )
            with connection.makefile("rb") as stream:
                line = stream.readline()
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise ConfigError(
                f"no job is running in {run_dir}; expected the run directory of a running job"
            ) from None
        except PermissionError:
            raise ConfigError(
                f"the job in {run_dir} belongs to another user; only its owner can send commands"
            ) from None
        except TimeoutError:
            raise ConfigError(
                f"the job in {run_dir} did not reply within {reply_timeout_s:g} s; "
                "check whether it is suspended (Ctrl-Z)"
            ) from None
        except ConnectionError:
            line = b""
    if not line.endswith(b"\n"):
        raise ConfigError(f"the job in {run_dir} ended before it replied")
    reply = json.loads(line)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return reply["value"]


def _connect(connection: socket.socket, path: str, timeout_s: float) -> None:
    """Connect; wait while the queue of a suspended job is full. Raises TimeoutError."""
    ends = time.monotonic() + timeout_s
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:  # at once, whatever the timeout of the socket
            if time.monotonic() > ends:
                raise TimeoutError from None
            time.sleep(RETRY_S)


@contextmanager
def _short_path(run_dir: Path) -> Iterator[str]:
    """Yield a path to the socket that fits into an address: through a link if the path of the run
    directory is too long."""
    path = run_dir.resolve() / SOCKET
    if len(os.fsencode(path)) < MAX_PATH:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as short:
        link = Path(short) / "run"
        link.symlink_to(run_dir.resolve(), target_is_directory=True)
        yield str(link / SOCKET)
