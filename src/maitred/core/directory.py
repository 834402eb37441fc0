"""How the tenants, keys and limits that a store keeps reach the gateways that use them.

A gateway holds all of them in memory, so that no request waits for a store and an unknown key costs nothing; it asks
the store for what has changed a few times a second. Every change gets a number, and numbers become visible in their
order, so `since` misses nothing.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from maitred.core.limits import Limit
from maitred.core.tenancy import ApiKey, Tenant


class DirectoryChanges(msgspec.Struct, frozen=True):
    """What is new since some version. What was deleted is named by its id alone."""

    version: int
    tenants: Sequence[Tenant] = ()
    keys: Sequence[ApiKey] = ()
    limits: Sequence[Limit] = ()
    deleted_tenants: Sequence[str] = ()
    deleted_keys: Sequence[str] = ()
    deleted_limits: Sequence[str] = ()


class DirectorySource(Protocol):
    """Where the directory is kept."""

    async def changes(self, since: int) -> DirectoryChanges:
        """Everything that changed after version `since`; 0 asks for all.

        Raises:
            StoreUnavailable: It cannot be read now.
        """
        ...
