"""Which addresses an identity provider's keys may come from."""

import ipaddress
from urllib.parse import urlsplit


def is_trustworthy(url: str) -> bool:
    """Whether what comes from there is what its owner sent: `https`, or this very machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if not host or parts.scheme not in ("https", "http"):
        return False
    if parts.scheme == "https" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
