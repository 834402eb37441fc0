"""Which hosts and origins a server without keys accepts, so that web pages of others cannot use it.

On a loopback address no key is needed, because whoever reaches it works on this machine. But so does a browser, and it
sends what any page tells it to send. A page of another site can post a chat completion without asking (``text/plain``
needs no preflight), and a page whose name was bound anew to 127.0.0.1 can read the answers, too. Browsers tell both:
the first by ``Origin`` or ``Sec-Fetch-Site``, the second by a ``Host`` that is not this machine.
"""

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from maitred.api.config import ServerConfig
from maitred.core.errors import Forbidden
from maitred.core.loopback import is_loopback

_LOCAL_SUFFIX = ".localhost"
"""Names that stand for this machine (RFC 6761, section 6.3)."""


def host_policy(config: ServerConfig) -> "HostPolicy | None":
    """Returns the policy of a server with these settings; None: it accepts every host and origin."""
    return HostPolicy(config.allowed_hosts) if config.is_local_without_keys else None


class HostPolicy:
    """Policy for the hosts and origins of requests without a key.

    Args:
        allowed_hosts: Names that are accepted beside those of this machine.
    """

    def __init__(self, allowed_hosts: Iterable[str] = ()) -> None:
        self._allowed_hosts = frozenset(name.lower().rstrip(".") for name in allowed_hosts)
        self._last_host: str | None = None
        """Value of the last `Host` that was accepted; most clients send the same."""

    def check(self, method: str, header: Callable[[bytes], str | None]) -> None:
        """Checks a request without a key.

        Raises:
            Forbidden: It is for another host, or it comes from a web page of another host.
        """
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
            allowed = self._is_allowed(origin)
        if not allowed:
            raise Forbidden(
                f"Without a key, web pages of other sites ({(origin or 'unknown')[:200]!r}) cannot use this server. "
                "Send a key, or have the page's host named in server.allowed_hosts."
            )

    def _is_allowed(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        return is_loopback(name) or name.endswith(_LOCAL_SUFFIX) or name in self._allowed_hosts
