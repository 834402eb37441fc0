"""HTTP proxies of the environment: which one leads to a server, and the tunnel through it.

The variables are those of curl: ``HTTPS_PROXY`` for servers with TLS, ``HTTP_PROXY`` for others, ``ALL_PROXY`` for
both, and ``NO_PROXY`` with names, domains, addresses and networks that are asked without one. Names in small letters
count before those in capitals. This machine is always asked without one. A server with TLS is reached through a tunnel
(``CONNECT``; RFC 9110, section 9.3.6), so the proxy sees its name and nothing else.
"""

import asyncio
import re
import socket
from base64 import b64encode
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from maitred.core.errors import ConfigInvalid
from maitred.wire.loopback import is_loopback

_MAX_HEAD_BYTES = 16 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]?([^\r\n]*)")
_CREDENTIALS_STATUS = 407
_DEFAULT_PORT = 3128
"""Port of proxies whose URL names none; curl takes 1080, and everybody's proxy listens at this one."""


class ProxyRefused(Exception):
    """The proxy gave no tunnel; the message says why."""


class HttpProxy(Struct, frozen=True):
    """HTTP proxy that leads to a server.

    Attributes:
        host: Its name or address.
        port: Its port.
        authorization: Value of the header `Proxy-Authorization`; empty: it wants none.
    """

    host: str
    port: int
    authorization: str = ""

    @property
    def name(self) -> str:
        """Host and port, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def open_tunnel(self, sock: socket.socket, host: str, port: int) -> None:
        """Asks the proxy at the other end of a socket for a tunnel to a server.

        Raises:
            ProxyRefused: It gives none.
            OSError: The connection failed.
        """
        loop = asyncio.get_running_loop()
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.authorization:
            lines.append(f"Proxy-Authorization: {self.authorization}")
        await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode())
        head = b""
        while b"\r\n\r\n" not in head:
            # The server says nothing before we do, so nothing of it is read here.
            data = await loop.sock_recv(sock, 4096)
            if not data or len(head) > _MAX_HEAD_BYTES:
                raise ProxyRefused(f"the proxy {self.name} gave no answer to CONNECT {target}")
            head += data
        found = _STATUS.match(head)
        if found is None:
            raise ProxyRefused(f"{self.name} is no HTTP proxy: look at HTTPS_PROXY")
        status, reason = int(found[1]), found[2].decode("latin-1").strip()[:100]
        if status == _CREDENTIALS_STATUS:
            raise ProxyRefused(
                f"the proxy {self.name} wants a user and a password (407): write them into HTTPS_PROXY, as "
                "http://user:password@host:port"
            )
        if not 200 <= status < 300:
            raise ProxyRefused(f"the proxy {self.name} refuses a tunnel to {target}: {status} {reason}")


def proxy_for(host: str, port: int, env: Mapping[str, str], *, uses_tls: bool) -> HttpProxy | None:
    """Returns the proxy that the environment names for a server; None: it is asked directly.

    Raises:
        ConfigInvalid: The variable is no URL of an HTTP proxy.
    """
    names = ("https_proxy", "all_proxy") if uses_tls else ("http_proxy", "all_proxy")
    variable = next((each for name in names for each in (name, name.upper()) if env.get(each, "").strip()), None)
    if (
        variable is None
        or is_loopback(host)
        or _is_excluded(host, port, env.get("no_proxy") or env.get("NO_PROXY", ""))
    ):
        return None
    url = env[variable].strip()
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        proxy_host, proxy_port = parts.hostname, parts.port
    except ValueError:
        proxy_host = proxy_port = None
        parts = urlsplit("")
    if parts.scheme != "http" or not proxy_host:
        # The message does not repeat the URL: it may hold a password.
        raise ConfigInvalid(f"{variable} must be the URL of an HTTP proxy, such as http://proxy.example:3128.")
    authorization = ""
    if parts.username is not None:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {b64encode(credentials.encode()).decode()}"
    return HttpProxy(proxy_host, proxy_port or _DEFAULT_PORT, authorization)


def _is_excluded(host: str, port: int, excluded: str) -> bool:
    """Returns whether `NO_PROXY` has a host: by its name, a domain above it, its address or a network."""
    host = host.lower().rstrip(".")
    for entry in re.split(r"[,\s]+", excluded.lower()):
        name, colon, its_port = entry.rpartition(":")
        if colon and its_port.isdigit() and ":" not in name:
            if int(its_port) != port:
                continue
            entry = name
        entry = entry.removeprefix("*").strip("[]") if entry != "*" else entry
        if entry == "*" or (entry and _matches(host, entry)):
            return True
    return False


def _matches(host: str, entry: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        domain = entry.strip(".")
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))
    try:
        return address in ip_network(entry, strict=False)
    except (ValueError, TypeError):
        return False
