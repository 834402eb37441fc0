"""Which addresses are this machine's own."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can be behind the address, or connect to it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may resolve to anything
