"""What must hold between the settings of the `dispatch` section."""

from collections import Counter
from collections.abc import Iterator

from maitred.dispatch.config import DispatchConfig

_MOST_SET_ASIDE = 0.95
"""Of everything; a little must be left for those who are not named."""


def dispatch_faults(config: DispatchConfig) -> Iterator[tuple[str, str]]:
    """The key to point at, and what is wrong."""
    set_aside = sum(config.reserved.values()) + sum(pool.share for pool in config.pools.values())
    if set_aside > _MOST_SET_ASIDE:
        key = "dispatch.pools" if config.pools else "dispatch.reserved"
        yield (
            key,
            f"Reserved shares and pools take {set_aside:.0%} of the replicas, so nothing is left for everybody else. "
            f"Together they may take {_MOST_SET_ASIDE:.0%}. Lower some of them.",
        )
    named = Counter([*config.reserved, *(tenant for pool in config.pools.values() for tenant in set(pool.tenants))])
    for tenant, times in named.items():
        if times > 1:
            key = "dispatch.reserved" if tenant in config.reserved else "dispatch.pools"
            yield (
                key,
                f"{tenant!r} is named {times} times in reserved shares and pools. It can have one part only; leave it "
                "in the one that it is to use.",
            )
