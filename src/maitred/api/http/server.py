"""uvicorn, on the socket that we listen on.

uvicorn's own reaction to SIGTERM closes the listener first, so a client that comes during the shutdown sees a refused
connection. We drain instead: keep listening, answer 503 with a time to come back, and tell uvicorn to stop when
nobody is inside any more. Hence the signals are ours, and uvicorn's handlers stay off.
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
_LAST_WORDS_S = 2
"""For error events to go out, once answers have been ended; a client that does not read must not hold us up."""
_LAST_REQUESTS_S = 1.0
_IDLE_S = 75
"""Idle connections stay open a little longer than common proxies keep theirs (60 s), so that the proxy closes first."""
_BACKLOG = 4096
"""A burst of a few thousand clients must not be refused by the kernel."""


class HttpServer(uvicorn.Server):
    """uvicorn, without its signal handlers.

    Args:
        application: What is served, by ASGI.
        stall_grace_s: How long a client may go without reading what is sent to it.
        path: A Unix socket to listen at, where `serve` is given none.
        shared: A socket where other processes take connections, too; `serve` is given none then either.
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
                http=_protocol(stall_grace_s),
                ws="none",
                interface="asgi3",  # what is no coroutine function itself would be taken for an older one
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_unexpected)
        self._shared = shared

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take connections."""
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

    def reconfigure(self, stall_grace_s: float) -> None:
        """Connections that come from now on have so much; those that are there keep what they had."""
        self.config.http_protocol_class = _protocol(stall_grace_s)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals alone."""
        yield

    async def retire(self, grace_s: float) -> None:
        """Accepts no more connections, since others do at the same address; those that it has may finish.

        Args:
            grace_s: What answers under way get.
        """
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LAST_REQUESTS_S)  # who has just been accepted has not sent anything yet
        self.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self.stop()

    def stop(self, *, at_once: bool = False) -> None:
        """Closes the listener and every connection; answers still under way get a moment unless `at_once`."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once


def _protocol(stall_grace_s: float) -> type[asyncio.Protocol]:
    return cast("type[asyncio.Protocol]", partial(HttpProtocol, stall_grace_s=stall_grace_s))


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Drops uvicorn's complaint about streams that we broke off on purpose; our own log has the request's id."""
    return "without completing response" not in record.getMessage()
