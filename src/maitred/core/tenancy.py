"""Tenancy: organisations have teams, teams have keys, and a request carries the whole path.

Organisation and team are both a `Tenant`; an organisation is one without a parent. A setting of a tenant applies to
everything below it, unless a lower level has a stricter one. Limits and budgets name a *subject*: ``tenant:acme``,
``key:5b1f0c9e7d2a``, ``*`` for the whole installation, or ``tenant:*`` and ``key:*`` for each one by itself.
"""

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec
from msgspec.structs import force_setattr

from maitred.core.errors import Forbidden, Unauthenticated
from maitred.core.flow import FlowLevel
from maitred.core.limits import Limit

ID_PATTERN = "[a-z0-9][a-z0-9_-]{0,62}"
_ID = re.compile(ID_PATTERN)


def is_id(text: object) -> bool:
    """Whether a value has the format of a tenant, key or limit id; other values are not looked up."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


class Scope(StrEnum):
    """Scope of a key: what it may be used for."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


class CacheDirective(StrEnum):
    """Directive of a request to caches of answers, in its ``Cache-Control`` header or in `cache` of its body."""

    NO_CACHE = "no-cache"
    """The answer is computed, even if a cache has one."""
    NO_STORE = "no-store"
    """The answer is not stored."""
    TTL = "ttl"
    """The answer is stored for at most so long."""
    S_MAXAGE = "s-maxage"
    """An answer from a cache is at most so old."""
    NAMESPACE = "namespace"
    """Answers of one namespace are not found in another."""
    ONLY_IF_CACHED = "only-if-cached"
    """Nothing is computed."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation, or a team in one."""

    id: str
    """Id from the creator: lower-case letters, digits, ``-`` and ``_``."""
    parent: str | None = None
    """The organisation of a team; None for an organisation."""
    name: str = ""
    weight: float = 1.0
    """Share of service relative to its siblings when they compete."""
    models: tuple[str, ...] | None = None
    """Models that may be used; None: all models of the parent."""
    priority_ceiling: int | None = None
    """Highest priority (1 to 10) that its requests may ask for; None: that of the parent."""
    regions: tuple[str, ...] = ()
    """Regions that may serve its requests; empty: those of the parent."""
    tags: tuple[str, ...] = ()
    """Privacy and other tags, such as ``local-only``; added to the parent's."""
    disabled: bool = False
    """Whether its keys and those of its teams are refused."""


class KeySecret(msgspec.Struct, frozen=True):
    """One secret of a key. During a rotation a key has two."""

    sha256: bytes
    """SHA-256 of the secret part. The secret has 256 random bits, so a slow hash would add no protection."""
    expires_s: float | None = None
    """Wall time at which the secret expires; None: never."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """API key as it is stored, without the secret."""

    id: str
    """The public id, the part of ``sk-mtd-<public id>-<secret>`` that may be shown and logged."""
    tenant: str
    name: str = ""
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    secrets: tuple[KeySecret, ...] = ()
    expires_s: float | None = None
    """Wall time at which the key expires; None: never."""
    revoked: bool = False
    cache_controls: tuple[CacheDirective, ...] | None = None
    """Directives to caches that its requests may give; None: those that the configuration allows."""

    @property
    def lasting(self) -> bool:
        """Whether the key has one secret, and neither of them expires."""
        return self.expires_s is None and len(self.secrets) == 1 and self.secrets[0].expires_s is None


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Authenticated sender of a request: the key with the combined settings of its tenants."""

    key: str
    """Public id of the key, or the subject of an identity provider's token."""
    tenants: tuple[str, ...]
    """Tenants from the key's own tenant up to the organisation; at least one."""
    scopes: frozenset[Scope]
    models: frozenset[str] | None = None
    """Models that all of these tenants allow; None: every model."""
    priority_ceiling: int = 10
    shares: tuple[FlowLevel, ...] = ()
    """Flow path with weights, from the organisation down to the key (see `maitred.core.flow`)."""
    regions: frozenset[str] | None = None
    """Allowed regions; None: all regions."""
    tags: frozenset[str] = frozenset()
    cache_controls: tuple[CacheDirective, ...] | None = None
    """Directives to caches that the requests may give; None: those that the configuration allows."""
    owners: tuple[str, ...] = ()
    """Names under which shared places are counted: the organisation, its teams down to the key's, and the key."""

    def __post_init__(self) -> None:
        # No id of a tenant has a slash
        force_setattr(self, "owners", (*self.tenants[::-1], f"{self.tenants[0]}/{self.key}"))

    @property
    def subjects(self) -> tuple[str, ...]:
        """Returns the subjects whose limits apply, from the narrowest to the widest."""
        return (f"key:{self.key}", *(f"tenant:{tenant}" for tenant in self.tenants), "*")

    def may_use(self, model: str) -> bool:
        """Whether the principal may use the model."""
        return self.models is None or model in self.models

    def regions_for(self, requested: frozenset[str] | None) -> frozenset[str] | None:
        """Returns the regions in which a request may be computed; None: in all regions.

        Args:
            requested: Regions that the request allows; None: all that its caller may use.
        """
        if requested is None or self.regions is None:
            return self.regions if requested is None else requested
        return self.regions & requested


ANONYMOUS = Principal(
    key="anonymous",
    tenants=("anonymous",),
    scopes=frozenset({Scope.INFERENCE, Scope.METRICS}),
    shares=(FlowLevel("anonymous"),),
)
"""Principal of a caller without a key on a server that needs no keys."""


def require(principal: Principal, scope: Scope) -> None:
    """Raises an error unless the principal has the scope.

    Raises:
        Unauthenticated: The caller is anonymous; a key could help.
        Forbidden: The key lacks the scope.
    """
    if scope in principal.scopes or (scope is Scope.METRICS and Scope.ADMIN in principal.scopes):
        return  # a principal that may change everything may also read it
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
            Unauthenticated: The caller is unknown.
            StoreUnavailable: The directory is too old to be used.
        """
        ...

    def is_still_valid(self, principal: Principal, header: Callable[[bytes], str | None]) -> bool:
        """Whether headers that identified a principal earlier are certainly still valid; False: ask again.

        Raises:
            StoreUnavailable: The directory is too old to be used.
        """
        ...


class DirectoryChanges(msgspec.Struct, frozen=True):
    """Changes of the directory since a version. Deleted items are listed by id only."""

    version: int
    tenants: Sequence[Tenant] = ()
    keys: Sequence[ApiKey] = ()
    limits: Sequence[Limit] = ()
    deleted_tenants: Sequence[str] = ()
    deleted_keys: Sequence[str] = ()
    deleted_limits: Sequence[str] = ()


class DirectorySource(Protocol):
    """Source of the directory of tenants, keys and limits.

    A gateway holds all tenants, keys and limits in memory, so requests never wait for a store and an unknown key costs
    nothing; the gateway asks the store for changes a few times a second. Every change has a number, and the numbers
    become visible in order, so `since` misses no change.
    """

    async def changes(self, since: int) -> DirectoryChanges:
        """Everything that changed after version `since`; 0 asks for all.

        Raises:
            StoreUnavailable: The source cannot be read now.
        """
        ...
