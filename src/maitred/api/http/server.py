"""HTTP server: uvicorn on the listening socket of the gateway.

At SIGTERM, uvicorn closes the listener first, so a client that comes during the shutdown gets a refused connection. The
gateway drains instead: it keeps listening, answers 503 with a retry time, and tells uvicorn to stop when no request is
in flight any more. For this reason the gateway handles the signals, and uvicorn's handlers are off.
"""

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn

from maitred.api.exchange import Receive, Scope, Send
from maitred.api.http.accept import FairAcceptor
from maitred.api.http.protocol import STALL_GRACE_S, HttpProtocol

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
LAST_WORDS_S = 2
"""Time to send error events after responses were cancelled; a client that does not read must not delay the shutdown."""
_LAST_REQUESTS_S = 1.0
_IDLE_S = 75
"""Idle connections stay open a little longer than common proxies keep theirs (60 s), so that the proxy closes first."""
_BACKLOG = 4096
"""Backlog that is large enough for the kernel to accept a burst of a few thousand clients."""


class HttpServer(uvicorn.Server):
    """Server of uvicorn without its signal handlers.

    Args:
        application: The ASGI application that is served.
        stall_grace_s: How long a client may go without reading the data sent to it.
        path: A Unix socket to listen at, if `serve` gets no socket.
        shared: A socket at which other processes accept connections, too; `serve` gets no socket in this case either.
    """

    def __init__(
        self,
        application: Application,
        *,
        stall_grace_s: float = STALL_GRACE_S,
        path: Path | None = None,
        shared: socket.socket | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                uds=None if path is None else str(path),
                loop="none",
                http=_protocol(stall_grace_s, knows_peer=path is not None),
                ws="none",
                interface="asgi3",  # uvicorn would take a callable object for an older version
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_unexpected)
        self._shared = shared
        self._knows_peer = path is not None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections."""
        if self._shared is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self.servers.append(
            cast(
                asyncio.Server, FairAcceptor(self._shared, self._connection, lambda: len(self.server_state.connections))
            )
        )

    def _connection(self) -> asyncio.Protocol:
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        return self.config.http_protocol_class(config=self.config, **state)  # type: ignore[call-arg]

    def reconfigure(self, application: Application, stall_grace_s: float) -> None:
        """Sets the application of new requests, and the stall grace of new connections; existing ones keep theirs."""
        self.config.app = self.config.loaded_app = application
        for connection in self.server_state.connections:
            cast("HttpProtocol", connection).app = application
        self.config.http_protocol_class = _protocol(stall_grace_s, knows_peer=self._knows_peer)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers."""
        yield

    async def retire(self, grace_s: float) -> None:
        """Accepts no more connections, because other processes accept them; existing connections finish.

        Args:
            grace_s: Time that running responses get.
        """
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LAST_REQUESTS_S)  # a connection that was just accepted may not have sent its request yet
        self.stop(grace_s=grace_s)

    def stop(self, *, at_once: bool = False, grace_s: float = LAST_WORDS_S) -> None:
        """Closes the listener and every connection; running responses get a short time unless `at_once`."""
        self.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self.should_exit = True
        self.force_exit = self.force_exit or at_once


def _protocol(stall_grace_s: float, *, knows_peer: bool) -> type[asyncio.Protocol]:
    return cast("type[asyncio.Protocol]", partial(HttpProtocol, stall_grace_s=stall_grace_s, knows_peer=knows_peer))


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Filters out uvicorn's error about streams aborted on purpose; the gateway's log has their ids."""
    return "without completing response" not in record.getMessage()
