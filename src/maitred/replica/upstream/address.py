"""URL of an upstream's API, checked and taken apart."""

from ipaddress import ip_address
from urllib.parse import quote, urlsplit

from maitred.core.errors import ConfigInvalid
from maitred.core.loopback import is_loopback

_PATH_SAFE = "/%:@!$&'()*+,;=~"
"""Characters of a URL's path that stay as they are (RFC 3986); what is percent-encoded already stays so."""
_QUERY_SAFE = _PATH_SAFE + "?"


class UpstreamUrl:
    """Checked URL of an upstream's API.

    Args:
        url: The URL as it is configured.

    Attributes:
        host, port: Host and port of the server.
        host_and_port: Host and port as the URL has them; without a user, which it must not have.
        uses_tls: Whether the server is reached by TLS.
        is_confidential: Whether no third party can read the traffic: it uses TLS, or never leaves this machine.
        is_private: Whether the address surely belongs to this machine or a private network; False for a host name, of
            which that is not known.

    Raises:
        ConfigInvalid: The text is no URL of an HTTP server, or it holds parts that belong elsewhere.
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
            # The message does not repeat the URL: it may hold a password.
            raise ConfigInvalid("The URL has a user or a password in it. Give the credential as `api_key`.")
        if parts.fragment:
            raise ConfigInvalid(f"{url!r} has a fragment, which no server gets to see. Remove what follows the #.")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.host = parts.hostname
        self.port = port or {"http": 80, "https": 443}[parts.scheme]
        self.host_and_port = host if port is None else f"{host}:{port}"
        self.uses_tls = parts.scheme == "https"
        self.is_confidential = self.uses_tls or is_loopback(parts.hostname)
        self.is_private = is_loopback(parts.hostname) or _is_private(parts.hostname)
        self._path = quote(parts.path.rstrip("/"), safe=_PATH_SAFE)
        self._query = f"?{quote(parts.query, safe=_QUERY_SAFE)}" if parts.query else ""

    def target(self, path: str) -> str:
        """Returns the request target of a path: below the API's URL, or at the root if it begins with a slash."""
        return (path if path.startswith("/") else f"{self._path}/{path}") + self._query


def _is_private(host: str) -> bool:
    try:
        return ip_address(host).is_private
    except ValueError:
        return False
