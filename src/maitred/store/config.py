"""The `store` section: where tenants, keys, limits and usage are kept."""

from typing import Annotated

from msgspec import Meta, Struct

from maitred.core.secret import Secret


class StoreConfig(Struct, frozen=True, kw_only=True):
    """Where tenants, keys, limits and usage are kept."""

    folder: Annotated[
        str,
        Meta(
            description="Folder of what this gateway keeps itself: the journal of usage and, without `url`, the SQLite "
            "database. Empty: `$XDG_DATA_HOME/maitred`, or `~/.local/share/maitred`. Each gateway needs its own."
        ),
    ] = ""
    url: Annotated[
        Secret | None,
        Meta(
            description="A database that several gateways share: `postgresql://user:password@host/name`, which needs "
            "`maitred[postgres]`. Empty: SQLite in `folder`."
        ),
    ] = None
    deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            le=300,
            description="How long one access to the database may take before it counts as unavailable.",
            extra={"unit": "seconds"},
        ),
    ] = 5.0
