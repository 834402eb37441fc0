"""What must hold between settings. Each rule says which settings it reads, what is wrong, and why that matters."""

import ipaddress
from collections.abc import Iterator

from msgspec import Struct

from maitred.config.tree import Config


class Conflict(Struct, frozen=True):
    """Settings that are sound one by one but not together; the first key is the one to point at."""

    keys: tuple[str, ...]
    message: str


def conflicts(config: Config) -> Iterator[Conflict]:
    """Everything that does not fit together."""
    if not is_loopback(config.server.host) and not config.server.allow_unauthenticated:
        yield Conflict(
            ("server.host", "server.allow_unauthenticated"),
            f"{config.server.host!r} can be reached from other machines, and this version checks no API keys: whoever "
            "reaches the port could use the model. Listen on 127.0.0.1, or set server.allow_unauthenticated: true if "
            "a proxy or firewall decides who may.",
        )
    engine = config.engine
    if engine.step_tokens < engine.max_sequences:
        yield Conflict(
            ("engine.step_tokens", "engine.max_sequences"),
            f"{engine.step_tokens} is less than engine.max_sequences, {engine.max_sequences}. Each running sequence "
            "takes one token of a step, so some would stand still. Raise step_tokens or lower max_sequences.",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may resolve to anything
