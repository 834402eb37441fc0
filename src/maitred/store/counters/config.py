"""Settings of the `counters` section: where limits and budgets are counted."""

from typing import Annotated

from msgspec import Meta, Struct

from maitred.core.secret import Secret


class CountersConfig(Struct, frozen=True, kw_only=True):
    """Counting of limits and budgets."""

    url: Annotated[
        Secret | None,
        Meta(
            description="A Redis that gateways share: `redis://user:password@host:6379/0`, `rediss://` for TLS or "
            "`unix:///path`. Needs `maitred[redis]`, and a Redis that evicts nothing (`maxmemory-policy noeviction`). "
            "Empty: in memory, for one gateway."
        ),
    ] = None
    namespace: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=64,
            pattern=r"^[A-Za-z0-9_.-]+$",
            description="Prefix of every key. Gateways of one name count together; give each installation on one Redis "
            "its own.",
        ),
    ] = "maitred"
    slice_share: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Part of each limit, and of what remains of each budget, that every gateway holds in advance, "
            "to go on with while Redis is away. It counts as taken, so no limit is passed. Limits smaller than the "
            "inverse of this part refuse everything while Redis is away. A gateway that spends more holds more, up to "
            "`busy_slice_share`; one that has not used a limit for a minute holds nothing of it.",
        ),
    ] = 0.02
    busy_slice_share: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Largest part that a gateway holds in advance of a rate or a budget that it spends: of a rate "
            "1.25 times the part that it used in the last minute, of a budget what it would spend at that pace in nine "
            "tenths of `slice_lease_s`. No more than `slice_share`: every gateway holds that.",
        ),
    ] = 0.2
    slice_lease_s: Annotated[
        float,
        Meta(
            ge=3,
            le=86400,
            description="How long what a gateway that vanished holds is kept from the others: its slices, and what its "
            "running requests have reserved. A gateway that cannot reach Redis uses its slices for nine tenths of this "
            "time (those of limits on what runs at one time for half of that), by its own clock, and then refuses.",
            extra={"unit": "seconds"},
        ),
    ] = 300.0
    absence_s: Annotated[
        float,
        Meta(
            ge=0,
            le=31 * 86400,
            description="How long after `slice_lease_s` what a vanished gateway held of *budgets* counts as spent, "
            "unless it comes back and tells what it spent. A gateway that is cut off for longer can pass budgets by "
            "what it spent meanwhile.",
            extra={"unit": "seconds"},
        ),
    ] = 86400.0
    answer_timeout_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=10,
            description="How long Redis may take to answer before it counts as away.",
            extra={"unit": "seconds"},
        ),
    ] = 0.25
    probe_interval_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=60,
            description="How often Redis is tried again while it is away.",
            extra={"unit": "seconds"},
        ),
    ] = 0.25
    recovery_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="How long a Redis that was found empty waits for all gateways to tell what they hold, before "
            "it takes reservations again.",
            extra={"unit": "seconds"},
        ),
    ] = 2.0
