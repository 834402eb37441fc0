"""Where an upstream is: the URL of its API, and what lies around it."""

from ipaddress import ip_address
from urllib.parse import quote, urlsplit

from maitred.core.errors import ConfigInvalid
from maitred.core.loopback import is_loopback

_PATH = "/%:@!$&'()*+,;=~"
"""What a path of a URL may have as it is (RFC 3986); what is quoted already stays so."""
_QUERY = _PATH + "?"


class Address:
    """The URL of an API, checked.

    Args:
        url: As it is configured.

    Attributes:
        host, port: Where it listens.
        host_and_port: As the URL has them; without a user, which it must not have.
        tls: Whether it is spoken to by TLS.
        safe: Whether nobody on the way can read along: it has TLS, or never leaves this machine.
        private: Whether it is surely of this machine or of a private network; of a name nobody knows that.

    Raises:
        ConfigInvalid: It is no URL of an HTTP server, or it holds what belongs elsewhere.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigInvalid(f"{url!r} is not a URL: {error}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigInvalid(f"{url!r} is not the URL of an HTTP server. Write it as https://host/v1.")
        if parts.username is not None or parts.password is not None:
            # Not repeated: it may hold a password.
            raise ConfigInvalid("The URL has a user or a password in it. Give the credential as `api_key`.")
        if parts.fragment:
            raise ConfigInvalid(f"{url!r} has a fragment, which no server gets to see. Remove what follows the #.")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.host = parts.hostname
        self.port = port or {"http": 80, "https": 443}[parts.scheme]
        self.host_and_port = host if port is None else f"{host}:{port}"
        self.tls = parts.scheme == "https"
        self.safe = self.tls or is_loopback(parts.hostname)
        self.private = is_loopback(parts.hostname) or _is_private(parts.hostname)
        self._path = quote(parts.path.rstrip("/"), safe=_PATH)
        self._query = f"?{quote(parts.query, safe=_QUERY)}" if parts.query else ""

    def target(self, path: str) -> str:
        """What a request names: a path below the API's, or at the server's root if it begins with a slash."""
        return (path if path.startswith("/") else f"{self._path}/{path}") + self._query


def _is_private(host: str) -> bool:
    try:
        return ip_address(host).is_private
    except ValueError:
        return False
