"""The server of `paceline watch`: the page and its data on the loopback interface.

Other users of the machine and other pages in the browser must not read prompts and completions. So
every path begins with a random token, and a request must name this server as its host, which a page
of another name that resolves to this address (DNS rebinding) cannot do.
"""

import logging
import secrets
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from paceline.errors import ConfigError
from paceline.page.document import document, to_json
from paceline.page.reader import RunReader

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
SEEN = ("metrics", "distributions", "evaluations", "samples")


class PageServer(ThreadingHTTPServer):
    """The server. `url` is the address of the page; `serve_forever` answers requests."""

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], port: int = 0) -> None:
        """Listen on a port, by default a free one."""
        self.runs = [RunReader(run_dir) for run_dir in run_dirs]
        self.token = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port {port}: cannot listen on {HOST}: {error}; expected a free port, or 0 "
                "to choose one"
            ) from None
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a request; a browser that closes its connection is not one."""
        log.debug("a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.headers.get("Host") not in self.server.hosts or not self._has_token(path):
            self._send(403, "text/plain", b"open the address that paceline watch has printed\n")
            return
        name = path.split("/")[2]
        if not name:
            self._send(200, "text/html", document().encode())
            return
        try:
            reply = self._reply(name, {key: found[0] for key, found in parse_qs(query).items()})
        except (KeyError, ValueError, IndexError):
            reply = None
        if reply is None:
            self._send(404, "text/plain", b"not found\n")
        else:
            self._send(200, "application/json", to_json(reply).encode())

    def _has_token(self, path: str) -> bool:
        parts = path.split("/")
        token = parts[1] if len(parts) == 3 else ""
        return secrets.compare_digest(token.encode(), self.server.token.encode())

    def _reply(self, name: str, query: dict[str, str]) -> Any:
        if name == "runs":
            return [run.run_dir.resolve().name for run in self.server.runs]
        number = int(query["run"])
        if number < 0:
            return None
        run = self.server.runs[number]
        if name == "data":
            # The first reply has the curves, so that the page opens before samples are listed.
            first = int(query.get("epoch", -1)) < 0
            more = run.update(samples=not first) or first
            seen = {name: max(0, int(query[name])) for name in SEEN if name in query}
            new = run.since(int(query.get("epoch", -1)), seen)
            return {**run.description(), **new, "more": more}
        if name == "group":
            return run.group(int(query["group"]))
        if name == "search":
            return run.search(query["text"])
        return None

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page polls every second."""
