"""Which addresses an identity provider's keys may come from."""

from urllib.parse import urlsplit

from maitred.core.loopback import is_loopback


def is_trustworthy(url: str) -> bool:
    """Whether what comes from there is what its owner sent: `https`, or this very machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if not host or parts.scheme not in ("https", "http"):
        return False
    return parts.scheme == "https" or is_loopback(host)
