"""Access to the gateway: identification of callers without waiting for the configuration or the store."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from maitred.app.assembly.stores import running
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound, StoreUnavailable
from maitred.core.tenancy import ANONYMOUS, ApiKey, Scope, Tenant
from maitred.identity.declared import make_declared_directory
from maitred.identity.directory import Directory
from maitred.identity.identity import DirectoryRefresher, Identity
from maitred.identity.keys import make_key
from maitred.identity.providers import token_issuers
from maitred.store.directory import DirectoryStore

OPERATORS = "operators"
"""Organisation that the first admin key belongs to."""
_FIRST_KEY = "firstadminkey000"
"""Public id of the first admin key. The id is the same for every gateway, so there is only one such key; it reveals no
secret."""


@dataclass(frozen=True, slots=True)
class AccessServices:
    """Services that identify and authorise callers."""

    directory: Directory
    identity: Identity
    refresher: DirectoryRefresher
    store: DirectoryStore

    async def declare(self, config: Config) -> None:
        """Puts the tenants, keys and limits of a configuration into the store, and applies them here at once.

        Raises:
            ConfigInvalid: The declared tenants, keys or limits have faults.
            StoreUnavailable: The store cannot be reached.
        """
        stated = make_declared_directory(config.tenants, config.identity)
        await self.store.declare(stated.tenants, stated.keys, stated.limits)
        with suppress(StoreUnavailable):  # the change is stored, so the next poll applies it
            await self.refresher.load()


@asynccontextmanager
async def open_access(
    config: Config, store: DirectoryStore, clock: Clock, show_key: Callable[[str], None]
) -> AsyncIterator[AccessServices]:
    """Stores the declared tenants, makes the first admin key if needed, and follows the store's changes.

    Args:
        config: The configuration with the declarations.
        store: Store of tenants, keys and limits.
        clock: Clock for expiry times and for the age of the cached directory.
        show_key: Shows the first admin key. The secret is not stored, so this is called before anything else can fail.

    Raises:
        ConfigInvalid: The declared tenants, keys or limits have faults.
        StoreUnavailable: The store cannot be reached.
    """
    stated = make_declared_directory(config.tenants, config.identity)
    await store.declare(stated.tenants, stated.keys, stated.limits)
    directory = Directory()
    refresher = DirectoryRefresher(
        store, directory, clock, every_s=config.identity.refresh_s, max_stale_s=config.identity.max_stale_s
    )
    await refresher.load()
    if not directory.anyone_with(Scope.ADMIN):
        if (first_key := await _make_first_key(store)) is not None:
            show_key(first_key)
        await refresher.load()
    async with token_issuers(config.identity.oidc, directory, clock) as issuers, running(refresher.run(), "directory"):
        identity = Identity(
            directory,
            clock,
            check_fresh=refresher.check,
            anonymous=ANONYMOUS if config.server.serves_anyone else None,
            issuers=issuers,
        )
        yield AccessServices(directory, identity, refresher, store)


async def _make_first_key(store: DirectoryStore) -> str | None:
    """Makes a new installation's first admin key; of gateways that start together, only one succeeds.

    The last admin key cannot be revoked; one that has expired is replaced by a key declared in the configuration.
    """
    with suppress(Conflict):  # the organisation may exist without its key, after a start that was interrupted
        await store.create_tenant(Tenant(id=OPERATORS, name="Whoever runs this installation"))
    new = make_key(_FIRST_KEY)
    key = ApiKey(id=new.public_id, tenant=OPERATORS, name="first admin key", scopes=tuple(Scope), secrets=(new.secret,))
    try:
        await store.create_key(key)
    except (Conflict, InvalidRequest, ResourceNotFound):  # a key existed already, or its tenant was deleted
        return None
    return new.plaintext
