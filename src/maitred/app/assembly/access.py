"""Access to the gateway: an `Identity` that answers without waiting for the configuration or the store."""

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
"""The organisation that the first admin key belongs to."""
_FIRST_KEY = "firstadminkey000"
"""Its public id. Everywhere the same, so that there is never a second one; no secret is known by it."""


@dataclass(frozen=True, slots=True)
class AccessServices:
    """Services that decide who calls."""

    directory: Directory
    identity: Identity
    refresher: DirectoryRefresher
    store: DirectoryStore

    async def declare(self, config: Config) -> None:
        """Puts the tenants, keys and limits of a configuration into the store, and applies them here at once.

        Raises:
            ConfigInvalid: What is declared has faults.
            StoreUnavailable: The store cannot be reached.
        """
        stated = make_declared_directory(config.tenants, config.identity)
        await self.store.declare(stated.tenants, stated.keys, stated.limits)
        with suppress(StoreUnavailable):  # it is stored; the next look will find it
            await self.refresher.load()


@asynccontextmanager
async def open_access(
    config: Config, store: DirectoryStore, clock: Clock, show_key: Callable[[str], None]
) -> AsyncIterator[AccessServices]:
    """Declares what the configuration says, makes a first admin key if there is none, and keeps up with the store.

    Args:
        config: Who is declared.
        store: Where tenants, keys and limits are kept.
        clock: For expiry, and the age of what is known.
        show_key: Shows a first admin key. It is kept nowhere, so this is called before anything else can fail.

    Raises:
        ConfigInvalid: What is declared has faults.
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
    """Makes it for an installation that has never had one; of several gateways that start together, one does.

    Whoever revoked all admin keys later has done so on purpose, and declares another in the configuration.
    """
    with suppress(Conflict):  # it may be there without its key, of a start that was cut short
        await store.create_tenant(Tenant(id=OPERATORS, name="Whoever runs this installation"))
    new = make_key(_FIRST_KEY)
    key = ApiKey(id=new.public_id, tenant=OPERATORS, name="first admin key", scopes=tuple(Scope), secrets=(new.secret,))
    try:
        await store.create_key(key)
    except (Conflict, InvalidRequest, ResourceNotFound):  # there was one, or its tenant was deleted
        return None
    return new.plaintext
