"""Addresses that are this machine's own, and addresses whose answers can be trusted."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether only this machine can be behind the address, or connect to it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may resolve to anything


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
