"""Listening socket of the gateway. It is bound without uvicorn, long before the HTTP server exists."""

import errno
import socket

from maitred.api.config import ServerConfig
from maitred.core.errors import ConfigInvalid

_UNSENT_BYTES = 16 * 1024
"""Limit of the unsent data that the kernel takes for a connection, in addition to the data on its way to the client. By
default the kernel takes 4 MiB of a response that nobody reads, so its memory would not be limited and a stalled client
would not be noticed; the limit does not reduce the speed of a connection (see TCP_NOTSENT_LOWAT in tcp(7))."""


def bind(config: ServerConfig) -> socket.socket:
    """Makes a socket that is bound, but does not listen yet.

    Raises:
        ConfigInvalid: The address is in use or does not belong to this machine.
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
                # Accepted connections inherit this option.
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


def format_url(listener: socket.socket) -> str:
    """Returns the URL at which clients reach the server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
