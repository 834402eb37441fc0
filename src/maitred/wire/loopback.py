"""Checks for loopback addresses and for addresses whose answers can be trusted."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether the address is a loopback address, reachable only from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may resolve to anything


def is_trustworthy(url: str) -> bool:
    """Whether answers from the URL are authentic: `https`, or a loopback address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if not host or parts.scheme not in ("https", "http"):
        return False
    return parts.scheme == "https" or is_loopback(host)
