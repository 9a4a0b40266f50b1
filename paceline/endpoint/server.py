"""HTTP server of the endpoint, on the loopback interface. Every API key belongs to one session.

Waits for: requests, each with a deadline for its body, and the sessions. Connections are limited:
one without a valid key ends after some seconds, and gives way to a new one when there are too many.
"""

import asyncio
import hashlib
import logging
import resource
import secrets
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from paceline.endpoint.reply import Reply, event
from paceline.endpoint.request import ChatRequest, RequestError, read_request
from paceline.endpoint.responses import read_responses_request, response
from paceline.endpoint.session import Session

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_BODY = 8 * 2**20  # bytes
BODY_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 4096
OPEN_FILES = 2 * MAX_CONNECTIONS + 1024  # both ends of each connection, and everything else
STRANGER_TIMEOUT_S = 10.0  # until a connection has sent a request with a valid key
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MODELS = "/v1/models"


class EndpointServer:
    """Serves the sessions that are open. Call `start` first and `close` at the end."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._sessions: dict[bytes, Session] = {}
        self._strangers: dict[RequestHandler, asyncio.TimerHandle] = {}  # oldest first
        self.port = 0

    async def start(self, port: int = 0) -> None:
        _allow_open_files()
        self._server = web.Server(
            self._handle,
            request_factory=self._make_request,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
        )
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connect, HOST, port, backlog=1024)
        self.port = self._listener.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def open(self, session: Session, key: str | None = None) -> str:
        """Serve a session; return its API key."""
        key = key or f"pl-{secrets.token_urlsafe(32)}"
        self._sessions[_digest(key)] = session
        return key

    async def end(self, key: str) -> None:
        """End the session of a key, with its requests in progress."""
        await self._sessions.pop(_digest(key)).close()

    async def close(self) -> None:
        self._listener.close()
        for session in list(self._sessions.values()):  # an episode may end meanwhile
            await session.close()
        for timer in self._strangers.values():
            timer.cancel()
        await self._server.shutdown(timeout=1.0)
        await self._listener.wait_closed()

    def _connect(self) -> asyncio.Protocol:
        handler = self._server()
        if len(self._server.connections) >= MAX_CONNECTIONS:
            connected = (each for each in self._strangers if each.transport is not None)
            self._drop(next(connected, handler))
        loop = asyncio.get_running_loop()
        self._strangers[handler] = loop.call_later(STRANGER_TIMEOUT_S, self._drop, handler)
        return handler

    def _drop(self, handler: RequestHandler) -> None:
        self._admit(handler)
        handler.force_close()

    def _admit(self, handler: RequestHandler) -> None:
        if timer := self._strangers.pop(handler, None):
            timer.cancel()

    def _make_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._reply(request, self._session(request))
        except web.HTTPRequestEntityTooLarge:
            error = RequestError(413, f"the body has more than {MAX_BODY} bytes")
        except RequestError as found:
            error = found
        except Exception:
            log.exception("a request to the endpoint failed")
            error = RequestError(500, "the server failed; its log has the reason")
        response = web.json_response(error.body(), status=error.status)
        response.headers["x-should-retry"] = "false"  # openai repeats others by itself
        if error.status in (401, 408, 413):
            response.force_close()  # what it still sends is not read
        return response

    def _session(self, request: web.BaseRequest) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_digest(key)) if scheme.lower() == "bearer" else None
        if session is None:
            raise RequestError(401, "unknown API key", code="invalid_api_key")
        self._admit(request.protocol)
        return session

    async def _reply(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        method, path = request.method, request.path.rstrip("/")
        if path == CHAT and method == "POST":
            return await self._chat(request, session, read_request(await _body(request)))
        if path == RESPONSES and method == "POST":
            asked = read_responses_request(await _body(request))
            return await self._chat(request, session, asked, as_response=True)
        if path.startswith(MODELS) and method == "GET":
            model = {"id": self._model_name, "object": "model", "created": 0}
            model["owned_by"] = "paceline"
            listed = {"object": "list", "data": [model]}
            return web.json_response(listed if path == MODELS else model)
        raise RequestError(
            404, f"{method} {path}: this server has POST {CHAT}, POST {RESPONSES}, GET {MODELS}"
        )

    async def _chat(
        self,
        request: web.BaseRequest,
        session: Session,
        asked: ChatRequest,
        as_response: bool = False,
    ) -> web.StreamResponse:
        start, choices = await session.complete(asked)
        reply = Reply(asked, start, choices, session.chat)
        try:
            if asked.stream:
                return await _stream(request, reply)
            whole = response(asked, start, choices[0]) if as_response else reply.whole()
            return await _send(request, whole)
        except BaseException:
            session.discard(choices)  # the client is gone
            raise


def _allow_open_files() -> None:
    """Raise this process's limit of open files, often 256 or 1024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _body(request: web.BaseRequest) -> bytes:
    if request.headers.get("Expect", "").lower() == "100-continue":  # the client waits for this
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None


async def _stream(request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for chunk in reply.chunks():
        await stream.write(event(chunk))
    await stream.write(event("[DONE]"))
    return stream


async def _send(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
    whole = web.json_response(body)
    await whole.prepare(request)
    await whole.write_eof()
    return whole


def _digest(key: str) -> bytes:
    # A lookup by the key itself would take a time that depends on it.
    return hashlib.sha256(key.encode(errors="replace")).digest()
