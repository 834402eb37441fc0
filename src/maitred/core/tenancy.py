"""Tenancy: organisations have teams, teams have keys, and a request carries the whole path.

Organisation and team are both a `Tenant`; an organisation is one without a parent. What is set on a tenant holds for
everything below it unless something below is stricter. Limits and budgets name a *subject*: ``tenant:acme``,
``key:5b1f0c9e7d2a``, ``*`` for the whole installation, or ``tenant:*`` and ``key:*`` for each one by itself.
"""

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from maitred.core.errors import Forbidden, Unauthenticated
from maitred.core.flow import FlowLevel
from maitred.core.limits import Limit

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def is_id(text: object) -> bool:
    """Whether it could be the id of a tenant, a key or a limit; what could not is not looked for."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


class Scope(StrEnum):
    """Scope of a key: what it may be used for."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation, or a team in one."""

    id: str
    """Chosen by whoever creates it: lower-case letters, digits, ``-`` and ``_``."""
    parent: str | None = None
    """The organisation of a team; None for an organisation."""
    name: str = ""
    weight: float = 1.0
    """Share of service relative to its siblings when they compete."""
    models: tuple[str, ...] | None = None
    """Models that may be used; None: all that the parent may."""
    priority_ceiling: int | None = None
    """Highest priority, 1 to 10, that its requests may ask for; None: as the parent."""
    regions: tuple[str, ...] = ()
    """Where its requests may be served; empty: as the parent."""
    tags: tuple[str, ...] = ()
    """Privacy and other tags, such as ``local-only``; added to the parent's."""
    disabled: bool = False
    """Its keys, and those of its teams, are refused."""


class KeySecret(msgspec.Struct, frozen=True):
    """One secret of a key. While a key is rotated it has two."""

    sha256: bytes
    """Of the secret part. The secret has 256 random bits, so that a slow hash would protect nothing."""
    expires_s: float | None = None
    """Wall time."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is stored: everything but the secret."""

    id: str
    """The public id, the part of ``sk-mtd-<public id>-<secret>`` that may be shown and logged."""
    tenant: str
    name: str = ""
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    secrets: tuple[KeySecret, ...] = ()
    expires_s: float | None = None
    """Wall time."""
    revoked: bool = False

    @property
    def lasting(self) -> bool:
        """Whether it has one secret, and no time at which either ends."""
        return self.expires_s is None and len(self.secrets) == 1 and self.secrets[0].expires_s is None


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Sender of a request, once known: the key with all that its tenants say, already combined."""

    key: str
    """Public id of the key; for a token of an identity provider, its subject."""
    tenants: tuple[str, ...]
    """From the key's own tenant up to the organisation; at least one."""
    scopes: frozenset[Scope]
    models: frozenset[str] | None = None
    """Models that all of them allow; None: every model."""
    priority_ceiling: int = 10
    shares: tuple[FlowLevel, ...] = ()
    """Its path through the tenants with their weights, from the organisation down to the key: whose share its requests
    use (see `maitred.core.flow`)."""
    regions: frozenset[str] | None = None
    """None: anywhere."""
    tags: frozenset[str] = frozenset()

    @property
    def subjects(self) -> tuple[str, ...]:
        """Whose limits hold, from the narrowest to the widest."""
        return (f"key:{self.key}", *(f"tenant:{tenant}" for tenant in self.tenants), "*")

    def may_use(self, model: str) -> bool:
        """Whether the model is open to it."""
        return self.models is None or model in self.models


ANONYMOUS = Principal(
    key="anonymous",
    tenants=("anonymous",),
    scopes=frozenset({Scope.INFERENCE, Scope.METRICS}),
    shares=(FlowLevel("anonymous"),),
)
"""Whoever sends no key to a server that asks for none."""


def require(principal: Principal, scope: Scope) -> None:
    """Lets pass who has the scope.

    Raises:
        Unauthenticated: Nobody knows who it is; with a key it could pass.
        Forbidden: The key is for something else.
    """
    if scope in principal.scopes or (scope is Scope.METRICS and Scope.ADMIN in principal.scopes):
        return  # who may change everything may look at it
    if principal is ANONYMOUS:
        raise Unauthenticated(
            f"This needs an API key with the scope `{scope}`. Send one as `Authorization: Bearer sk-mtd-…`."
        )
    raise Forbidden(f"This key does not have the scope `{scope}`. Use one that has it.")


class Authenticator(Protocol):
    """Authenticator of requests by their headers."""

    async def identify(self, header: Callable[[bytes], str | None]) -> Principal:
        """Returns the sender of a request with these headers.

        Args:
            header: The first value of a header, by its name in lower case.

        Raises:
            Unauthenticated: Nobody that is known here.
            StoreUnavailable: What is known is too old to go by.
        """
        ...

    def is_still_valid(self, principal: Principal, header: Callable[[bytes], str | None]) -> bool:
        """Whether these headers, which were found to be a principal's before, surely are still; False: ask again.

        Raises:
            StoreUnavailable: What is known is too old to go by.
        """
        ...


class DirectoryChanges(msgspec.Struct, frozen=True):
    """Changes of the directory since some version. What was deleted is named by its id alone."""

    version: int
    tenants: Sequence[Tenant] = ()
    keys: Sequence[ApiKey] = ()
    limits: Sequence[Limit] = ()
    deleted_tenants: Sequence[str] = ()
    deleted_keys: Sequence[str] = ()
    deleted_limits: Sequence[str] = ()


class DirectorySource(Protocol):
    """Where the directory is kept.

    A gateway holds all tenants, keys and limits in memory, so that no request waits for a store and an unknown key
    costs nothing; it asks the store for changes a few times a second. Every change gets a number, and numbers become
    visible in their order, so `since` misses nothing.
    """

    async def changes(self, since: int) -> DirectoryChanges:
        """Everything that changed after version `since`; 0 asks for all.

        Raises:
            StoreUnavailable: It cannot be read now.
        """
        ...
