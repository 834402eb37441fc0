"""Base of scripted servers that run in the event loop of a test, on a real socket."""

import asyncio
import ssl
from abc import ABC, abstractmethod
from typing import Self


class ScriptedSocketServer(ABC):
    """Server on a free port of the loopback interface, which runs while its context is open.

    Args:
        tls: Makes it speak TLS; None: it does not.

    Attributes:
        url: Base URL of the API.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.url = ""
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_connect, "127.0.0.1", 0, ssl=self._tls)
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the test has ended
        finally:
            self._connections.discard(task)
            writer.close()

    @abstractmethod
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serves one request, and returns whether the connection can carry another."""
