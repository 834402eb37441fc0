"""Settings of the `store` section: where tenants, keys, limits and usage are kept."""

from typing import Annotated

from msgspec import Meta, Struct

from maitred.core.secret import Secret


class StoreConfig(Struct, frozen=True, kw_only=True):
    """Storage of tenants, keys, limits and usage."""

    folder: Annotated[
        str,
        Meta(
            description="Folder of what this gateway keeps itself: the journal of usage and, without `url`, the SQLite "
            "database. Empty: `$XDG_DATA_HOME/maitred`, or `~/.local/share/maitred`. Gateways that count in "
            "memory need one each."
        ),
    ] = ""
    url: Annotated[
        Secret | None,
        Meta(
            description="A database that several gateways share: `postgresql://user:password@host/name`, which needs "
            "`maitred[postgres]`. Empty: SQLite in `folder`."
        ),
    ] = None
    durable_journal: Annotated[
        bool,
        Meta(
            description="Sync every line of the usage journal to the disk, so that not even a machine that loses power "
            "forgets one. Each request waits twice for the disk then, and all others with it. Without this, such a "
            "machine may forget the last 30 seconds or so; the death of the gateway alone loses nothing either way."
        ),
    ] = False
    response_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            le=31_622_400,
            description="How long a response of `/v1/responses` is kept for later requests that go on with it, and a "
            "conversation after its last use. 0: none is kept.",
            extra={"unit": "seconds"},
        ),
    ] = 2_592_000.0
    deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            le=300,
            description="How long one access to the database may take before it counts as unavailable.",
            extra={"unit": "seconds"},
        ),
    ] = 5.0
