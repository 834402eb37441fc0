"""The socket that we listen on, and uvicorn on it.

uvicorn's own reaction to SIGTERM closes the listener first, so a client that comes during the shutdown sees a refused
connection. We drain instead: keep listening, answer 503 with a time to come back, and tell uvicorn to stop when
nobody is inside any more. Hence the signals are ours, and uvicorn's handlers stay off.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import uvicorn

from maitred.api.config import ServerConfig
from maitred.api.edge import Edge
from maitred.app.http_protocol import STALL_GRACE_S, BoundedHttp
from maitred.core.errors import ConfigInvalid

_LAST_WORDS_S = 2
"""For error events to go out, once answers have been ended; a client that does not read must not hold us up."""
_IDLE_S = 75
"""Idle connections stay open a little longer than common proxies keep theirs (60 s), so that the proxy closes first."""
_UNSENT_BYTES = 16 * 1024
"""What the kernel takes for a connection beyond what is under way to the client. By itself it takes 4 MiB of an answer
that nobody reads, so that neither its memory would be bounded nor anything noticed; the speed of a connection does not
suffer (see TCP_NOTSENT_LOWAT in tcp(7))."""
_BACKLOG = 4096
"""A burst of a few thousand clients must not be refused by the kernel."""


def bind(config: ServerConfig) -> socket.socket:
    """A socket that is bound, but does not listen yet.

    Raises:
        ConfigInvalid: The address is taken or not ours.
    """
    address = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                # Connections that it accepts inherit it.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            listener.bind(target)
        except OSError:
            listener.close()
            raise
        return listener
    except socket.gaierror as error:
        raise ConfigInvalid(f"server.host {config.host!r} is no address of this machine: {error.strerror}.") from error
    except PermissionError as error:
        raise ConfigInvalid(f"{address} needs more rights: take a port above 1023 with --port.") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigInvalid(
                f"Port {config.port} on {config.host} is in use. Stop what listens there, or take another one with "
                "--port (0 finds a free one)."
            ) from error
        raise ConfigInvalid(f"Cannot listen on {address}: {error.strerror}. Check server.host.") from error


def url_of(listener: socket.socket) -> str:
    """Where clients reach it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn, without its signal handlers.

    Args:
        edge: The application.
        stall_grace_s: How long a client may go without reading what is sent to it.
    """

    def __init__(self, edge: Edge, *, stall_grace_s: float = STALL_GRACE_S) -> None:
        super().__init__(
            uvicorn.Config(
                edge,
                loop="none",
                http=cast("type[asyncio.Protocol]", partial(BoundedHttp, stall_grace_s=stall_grace_s)),
                ws="none",
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
        logging.getLogger("uvicorn.error").addFilter(_expected)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals alone."""
        yield

    def stop(self, *, at_once: bool = False) -> None:
        """Closes the listener and every connection; answers still under way get a moment unless `at_once`."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once


def _expected(record: logging.LogRecord) -> bool:
    """Drops uvicorn's complaint about streams that we broke off on purpose; our own log has the request's id."""
    return "without completing response" not in record.getMessage()
