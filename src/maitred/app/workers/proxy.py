"""Hands HTTP requests on to the controller's own edge, over a Unix socket, and their answers back as they come."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import yarl

from maitred.api.errors import Header, body_of, headers_of
from maitred.api.exchange import JSON, Receive, Scope, Send
from maitred.app.workers.client import AWAY
from maitred.core.errors import Unavailable

_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"date"})
"""Of one connection alone (RFC 9110, 7.6.1); and what the server of the worker adds by itself."""
_RETRY_AFTER_S = 2.0


class ControllerProxy:
    """An ASGI application. A context; leaving it closes its connections.

    Args:
        path: Where the controller's edge listens.
        most_bytes: Of a body. What goes beyond is not read on; the controller refuses it.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._most_bytes = most_bytes
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
        """ASGI's entry point. A client that leaves ends the request at the controller as well."""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False) and len(body) <= self._most_bytes
        work = asyncio.create_task(self.relay(scope, bytes(body), send), name=f"{scope['method']} {scope['path']}")
        leaving = asyncio.create_task(_left(receive), name="client")
        try:
            await asyncio.wait([work, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def relay(self, scope: Scope, body: bytes, send: Send) -> int:
        """Sends a request and passes the answer on; returns its status."""
        assert self._session is not None
        target = scope["raw_path"].decode("latin-1")
        if query := scope.get("query_string"):
            target = f"{target}?{query.decode('latin-1')}"
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in _kept(scope["headers"])
            if name != b"content-length"
        ]
        try:
            response = await self._session.request(
                scope["method"],
                yarl.URL(f"http://controller{target}", encoded=True),
                headers=headers,
                data=body or None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError):
            return await _refuse(Unavailable(AWAY, retry_after_s=_RETRY_AFTER_S), send)
        try:
            raw = [(name.lower(), value) for name, value in response.raw_headers]
            await send({"type": "http.response.start", "status": response.status, "headers": _kept(raw)})
            async for piece in response.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            response.close() if not response.content.at_eof() else response.release()
        return response.status


async def _left(receive: Receive) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _kept(headers: Sequence[Header]) -> list[Header]:
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP]


async def _refuse(error: Unavailable, send: Send) -> int:
    body = body_of(error)
    head = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), *headers_of(error)]
    await send({"type": "http.response.start", "status": error.http_status, "headers": head})
    await send({"type": "http.response.body", "body": body})
    return error.http_status
