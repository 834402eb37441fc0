"""URL of an upstream's API, validated and parsed."""

from ipaddress import ip_address
from urllib.parse import quote, urlsplit

from maitred.core.errors import ConfigInvalid
from maitred.wire.loopback import is_loopback

_PATH_SAFE_CHARACTERS = "/%:@!$&'()*+,;=~"
"""Characters of a path that are not percent-encoded (RFC 3986); `%` keeps existing encodings."""
_QUERY_SAFE = _PATH_SAFE_CHARACTERS + "?"


class UpstreamUrl:
    """Validated URL of an upstream's API.

    Args:
        url: The configured URL.

    Attributes:
        host, port: Host and port of the server.
        host_and_port: Host and, if the URL has one, port, as in the Host header.
        uses_tls: Whether the scheme is https.
        is_confidential: Whether the traffic uses TLS or stays on this machine, so that no third party can read it.
        is_private: Whether the host is an address of this machine or of a private network; False for other host names.

    Raises:
        ConfigInvalid: The text is not an HTTP URL, or it contains a user, a password or a fragment.
    """

    def __init__(self, url: str) -> None:
        try:
            split_url = urlsplit(url)
            port = split_url.port
        except ValueError as error:
            raise ConfigInvalid(f"{url!r} is not a URL: {error}.") from None
        if split_url.scheme not in ("http", "https") or not split_url.hostname:
            raise ConfigInvalid(f"{url!r} is not the URL of an HTTP server. Write it as https://host/v1.")
        if split_url.username is not None or split_url.password is not None:
            # The message does not repeat the URL: it may hold a password.
            raise ConfigInvalid("The URL has a user or a password in it. Give the credential as `api_key`.")
        if split_url.fragment:
            raise ConfigInvalid(f"{url!r} has a fragment, which no server gets to see. Remove what follows the #.")
        bracketed_host = f"[{split_url.hostname}]" if ":" in split_url.hostname else split_url.hostname
        self.host = split_url.hostname
        self.port = port or {"http": 80, "https": 443}[split_url.scheme]
        self.host_and_port = bracketed_host if port is None else f"{bracketed_host}:{port}"
        self.uses_tls = split_url.scheme == "https"
        self.is_confidential = self.uses_tls or is_loopback(split_url.hostname)
        self.is_private = is_loopback(split_url.hostname) or _is_private(split_url.hostname)
        self._path = quote(split_url.path.rstrip("/"), safe=_PATH_SAFE_CHARACTERS)
        self._query = f"?{quote(split_url.query, safe=_QUERY_SAFE)}" if split_url.query else ""

    def target(self, path: str) -> str:
        """Returns the request target of a path, which is relative to the API's URL unless it begins with /."""
        return (path if path.startswith("/") else f"{self._path}/{path}") + self._query


def _is_private(host: str) -> bool:
    try:
        return ip_address(host).is_private
    except ValueError:
        return False
