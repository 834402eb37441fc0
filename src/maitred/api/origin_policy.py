"""Policy for the hosts and origins that requests name: which web pages may use the API.

A browser sends what any page tells it to send. Two rules protect against that:

* On a loopback address no key is needed, because whoever reaches it works on this machine. But so does a browser. A
  page of another site can post a chat completion without asking (``text/plain`` needs no preflight), and a page whose
  name was bound anew to 127.0.0.1 can read the answers, too. Browsers tell both: the first by ``Origin`` or
  ``Sec-Fetch-Site``, the second by a ``Host`` that is another machine.
* A page of another origin reads a response only if a header names the origin, and its browser asks before it sends a
  key or a JSON body (a preflight): cross-origin resource sharing, CORS, as in the Fetch standard, section 3.3. Keys are
  sent in headers that the page sets itself and never as cookies, so no response allows credentials.
"""

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from maitred.api.config import ServerConfig
from maitred.api.dialect import Header
from maitred.core.errors import Forbidden
from maitred.wire.loopback import is_loopback

_ANY_ORIGIN = "*"
_LOCAL_SUFFIX = ".localhost"
"""Names that stand for this machine (RFC 6761, section 6.3)."""
_PREFLIGHT_AGE_S = 600
"""Time for which a browser may keep the answer to a preflight."""
_METHOD, _HEADERS = b"access-control-request-method", b"access-control-request-headers"

GetHeader = Callable[[bytes], str | None]
"""Returns the value of a header by its name in lower case."""


class OriginPolicy:
    """Policy for the hosts and origins of requests.

    Args:
        config: Settings of the HTTP server.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._is_local_without_keys = config.is_local_without_keys
        self._allowed_hosts = frozenset(name.lower().rstrip(".") for name in config.allowed_hosts)
        self._origins = frozenset(map(str.lower, config.cors_origins))
        self._last_host: str | None = None
        """Value of the last `Host` that was accepted; most clients send the same."""

    def check_without_key(self, method: str, header: GetHeader) -> None:
        """Checks a request without a key; only a server on a loopback address that needs none refuses any.

        Raises:
            Forbidden: It is for another host, or it comes from a web page of another host.
        """
        if not self._is_local_without_keys:
            return
        host = header(b"host")
        if host is not None and host != self._last_host and not self._is_allowed("//" + host):
            raise Forbidden(
                f"Without a key, this server answers only requests to this machine, and {host[:200]!r} is another. "
                "Send a key, or have the host named in server.allowed_hosts."
            )
        self._last_host = host
        origin = header(b"origin")
        if origin is None:
            # Whoever follows a link comes from another site, too.
            is_link = (
                method in ("GET", "HEAD")
                and header(b"sec-fetch-mode") == "navigate"
                and header(b"sec-fetch-dest") == "document"
            )
            allowed = header(b"sec-fetch-site") != "cross-site" or is_link
        else:
            allowed = origin.lower() in self._origins or self._is_allowed(origin)
        if not allowed:
            raise Forbidden(
                f"Without a key, web pages of other sites ({(origin or 'unknown')[:200]!r}) cannot use this server. "
                "Send a key, or have the page's origin named in server.cors_origins."
            )

    def response_headers(self, origin: str) -> Sequence[Header]:
        """Returns the headers that let pages of this origin read a response; empty if they may not."""
        if _ANY_ORIGIN in self._origins:
            allowed = _ANY_ORIGIN
        elif origin.lower() in self._origins:
            allowed = origin
        else:
            return ()
        return [
            (b"access-control-allow-origin", allowed.encode("latin-1")),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"origin"),
        ]

    def preflight_headers(self, origin: str, header: GetHeader) -> Sequence[Header]:
        """Returns the headers that allow the request which a preflight asks for, besides `response_headers`.

        Args:
            origin: Origin of the page.
            header: Returns a header of the preflight.

        Raises:
            Forbidden: Pages of this origin may not use the API.
        """
        if not self.response_headers(origin):
            raise Forbidden(
                f"Web pages of {origin[:200]!r} may not use this server from a browser. Have that origin named in "
                "server.cors_origins."
            )
        allowed = (
            (b"access-control-allow-methods", header(_METHOD)),
            (b"access-control-allow-headers", header(_HEADERS)),
        )
        return [
            *((name, value.encode("latin-1")) for name, value in allowed if value is not None),
            (b"access-control-max-age", b"%d" % _PREFLIGHT_AGE_S),
        ]

    def _is_allowed(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        return is_loopback(name) or name.endswith(_LOCAL_SUFFIX) or name in self._allowed_hosts


def is_preflight(method: str, header: GetHeader) -> bool:
    """Returns whether a browser asks what a page may send."""
    return method == "OPTIONS" and header(_METHOD) is not None
