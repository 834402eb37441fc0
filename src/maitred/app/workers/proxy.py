"""Forwards HTTP requests to the controller's own HTTP server over a Unix socket, and streams the responses back.

The handshake of a WebSocket takes its connection with it (`maitred.app.workers.tunnel`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import yarl

from maitred.api.dialect import Header, error_body, error_headers
from maitred.api.exchange import JSON, Receive, Scope, Send
from maitred.app.workers.controller_client import CONTROLLER_UNAVAILABLE
from maitred.app.workers.tunnel import open_tunnel
from maitred.core.errors import MaitredError, Unavailable

_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"date"})
"""Headers that belong to one connection alone (RFC 9110, 7.6.1), and those that the worker's server adds itself."""
_RETRY_AFTER_S = 2.0


class ControllerProxy:
    """An ASGI application that forwards requests to the controller. As a context manager it closes its connections.

    Args:
        path: The Unix socket where the controller's HTTP server listens.
        max_body_bytes: Most bytes of a body that are read; the controller rejects a longer one.
    """

    def __init__(self, path: Path, max_body_bytes: int) -> None:
        self._path = path
        self._max_body_bytes = max_body_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ControllerProxy":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._path), limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI request. A client that disconnects ends the request at the controller as well."""
        if any(name == b"upgrade" for name, _ in scope["headers"]):
            if (failure := await open_tunnel(scope, self._path)) is not None:
                await _send_error(failure, send)
            return
        body: bytes | AsyncIterator[bytes]
        body_read = asyncio.Event()
        if _is_form(scope["headers"]):
            body = _form_pieces(receive, body_read)  # a file may be larger than what is kept in memory
        else:
            read = bytearray()
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                read += message.get("body", b"")
                more = message.get("more_body", False) and len(read) <= self._max_body_bytes
            body = bytes(read)
            body_read.set()
        forward_task = asyncio.create_task(self.forward(scope, body, send), name=f"{scope['method']} {scope['path']}")
        disconnect_task = asyncio.create_task(_wait_disconnect(receive, body_read), name="client")
        try:
            await asyncio.wait([forward_task, disconnect_task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect_task.cancel()
            if not forward_task.done():
                forward_task.cancel()
                await asyncio.wait([forward_task])
        if not forward_task.cancelled():
            forward_task.result()

    async def forward(self, scope: Scope, body: bytes | AsyncIterator[bytes], send: Send) -> int:
        """Forwards a request and streams the response back; returns its status."""
        assert self._session is not None
        target = scope["raw_path"].decode("latin-1")
        if query := scope.get("query_string"):
            target = f"{target}?{query.decode('latin-1')}"
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in _end_to_end_headers(scope["headers"])
            if name != b"content-length"
        ]
        try:
            response = await self._session.request(
                scope["method"],
                yarl.URL(f"http://localhost{target}", encoded=True),
                headers=headers,
                data=body or None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError):
            return await _send_error(Unavailable(CONTROLLER_UNAVAILABLE, retry_after_s=_RETRY_AFTER_S), send)
        try:
            raw = [(name.lower(), value) for name, value in response.raw_headers]
            await send({"type": "http.response.start", "status": response.status, "headers": _end_to_end_headers(raw)})
            async for piece in response.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            response.close() if not response.content.at_eof() else response.release()
        return response.status


def _is_form(headers: Sequence[Header]) -> bool:
    """Returns whether the body is a form with files."""
    return any(name == b"content-type" and value.lower().startswith(b"multipart/form-data") for name, value in headers)


async def _form_pieces(receive: Receive, body_read: asyncio.Event) -> AsyncIterator[bytes]:
    """Yields a body as it comes, and says when all of it has come; a client that leaves breaks it off."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("The client left.")
        if piece := message.get("body", b""):
            yield piece
        more = message.get("more_body", False)
    body_read.set()


async def _wait_disconnect(receive: Receive, body_read: asyncio.Event) -> None:
    """Waits until the client has disconnected, after its body was read."""
    await body_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


def _end_to_end_headers(headers: Sequence[Header]) -> list[Header]:
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP]


async def _send_error(error: MaitredError, send: Send) -> int:
    body = error_body(error)
    head = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), *error_headers(error)]
    await send({"type": "http.response.start", "status": error.http_status, "headers": head})
    await send({"type": "http.response.body", "body": body})
    return error.http_status
