"""Origin of a server, from a URL that is parsed once."""

import asyncio
import socket
import ssl
from urllib.parse import urlsplit

import msgspec

from maitred.core.errors import InvalidRequest, Unavailable


class Origin(msgspec.Struct, frozen=True):
    """Origin of a server: scheme, host and port.

    Attributes:
        host: Name or address of the server.
        port: TCP port.
        secure: Whether connections use TLS.
        base: Prefix of all paths, which ends before ``/v1``.
    """

    host: str
    port: int
    secure: bool
    base: str

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """Parses a URL to its origin.

        Raises:
            InvalidRequest: The text is not an HTTP address.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host is None or parts.scheme not in ("http", "https"):
            raise InvalidRequest(f"{url!r} is not an address of a server. Write it as http://host:port.")
        secure = parts.scheme == "https"
        return cls(host, port or (443 if secure else 80), secure, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """Value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    def head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        """Returns the head of a request without its ``Content-Length`` and the empty line."""
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {self.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n").encode("latin-1")

    async def resolve(self) -> tuple[str, int]:
        """Resolves the name to an address, once, so that no connection waits for the name service.

        Raises:
            Unavailable: The name is unknown, or no address of it takes connections.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"There is no host {self.host!r}. Check --url.") from error
        for *_, address in found:
            try:
                transport, _ = await asyncio.wait_for(
                    loop.create_connection(asyncio.Protocol, str(address[0]), self.port), timeout=10
                )
            except (OSError, TimeoutError):
                continue
            transport.close()
            return str(address[0]), self.port
        raise Unavailable(
            f"Nothing answers at {self.host}:{self.port}. Start a server with `maitred serve`, or pass --url."
        )

    def tls(self) -> ssl.SSLContext | None:
        """Returns the TLS context of a secure connection; None for a plain one."""
        return ssl.create_default_context() if self.secure else None
