"""All tenants, keys and limits in memory, with the combined settings of each key.

A request finds its key in dictionaries without any wait. The settings of all tenants up to the organisation are
combined at the first use of one of their keys, and again only after one of these tenants has changed.
"""

from collections.abc import Iterable, Sequence

import msgspec

from maitred.core.flow import HIGHEST_PRIORITY, FlowLevel
from maitred.core.limits import Limit
from maitred.core.tenancy import ApiKey, CacheDirective, DirectoryChanges, Principal, Scope, Tenant


class _Path(msgspec.Struct, frozen=True):
    """Combined settings of a tenant and its ancestors, shared by all keys of the tenant."""

    tenants: tuple[str, ...]
    models: frozenset[str] | None
    regions: frozenset[str] | None
    tags: frozenset[str]
    priority_ceiling: int
    shares: tuple[FlowLevel, ...]


class Directory:
    """Tenants, keys and limits that a gateway knows. Implements `maitred.core.limits.LimitSource`.

    Attributes:
        version: Version of the source up to which all changes are known; 0 before the first load.
        edition: See `LimitSource.edition`. It keeps growing even if a restored source starts again.
    """

    def __init__(self) -> None:
        self.version = 0
        self.edition = 0
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, ApiKey] = {}
        self._limits: dict[str, Limit] = {}
        self._teams: dict[str, set[str]] = {}
        """Tenant -> its direct child tenants."""
        self._members: dict[str, set[str]] = {}
        """Tenant -> its keys."""
        self._book: dict[str, tuple[Limit, ...]] = {}
        """Subject -> its limits."""
        self._paths: dict[str, _Path | None] = {}
        self._principals: dict[str, tuple[ApiKey, Principal | None]] = {}

    def key(self, public_id: str) -> ApiKey | None:
        """Returns the key with this public id."""
        return self._keys.get(public_id)

    def tenant(self, tenant_id: str) -> Tenant | None:
        """Returns the organisation or team with this id."""
        return self._tenants.get(tenant_id)

    def anyone_with(self, scope: Scope) -> bool:
        """Whether an unrevoked key with this scope exists."""
        return any(scope in key.scopes and not key.revoked for key in self._keys.values())

    def limits_of(self, subject: str) -> Sequence[Limit]:
        """Returns the limits of a subject; implements `LimitSource`."""
        return self._book.get(subject, ())

    def principal_for(self, key: ApiKey) -> Principal | None:
        """Returns the principal of a key; None if the key is revoked or a tenant is disabled or missing.

        The expiry is not checked, because it depends on the time.
        """
        known = self._principals.get(key.id)
        if known is not None and known[0] is key:
            return known[1]
        principal = None
        if not key.revoked:
            principal = self.principal_in(
                key.tenant, key=key.id, scopes=frozenset(key.scopes), cache_controls=key.cache_controls
            )
        if self._keys.get(key.id) is key:
            self._principals[key.id] = (key, principal)
        return principal

    def is_still_valid(self, principal: Principal) -> bool:
        """Whether the principal is current: its key and its tenants are unchanged.

        The result changes only with the directory, so a caller that has proved the secret once need not prove it again.
        """
        key, known = self._principals.get(principal.key, (None, None))
        return known is principal and key is not None and key.lasting

    def principal_in(
        self,
        tenant_id: str,
        *,
        key: str,
        scopes: frozenset[Scope],
        cache_controls: tuple[CacheDirective, ...] | None = None,
    ) -> Principal | None:
        """Returns a principal of a tenant, for any kind of proof; None as in `principal_for`."""
        if tenant_id in self._paths:
            path = self._paths[tenant_id]
        else:
            path = self._path(tenant_id)
            if tenant_id in self._tenants:  # only existing tenants are cached, because a token may contain any name
                self._paths[tenant_id] = path
        if path is None:
            return None
        return Principal(
            key=key,
            tenants=path.tenants,
            scopes=scopes,
            models=path.models,
            priority_ceiling=path.priority_ceiling,
            shares=(*path.shares, FlowLevel(key)),
            regions=path.regions,
            tags=path.tags,
            cache_controls=cache_controls,
        )

    def replace(self, everything: DirectoryChanges) -> None:
        """Replaces the whole content with `everything`."""
        gone = {
            "deleted_tenants": tuple(self._tenants),
            "deleted_keys": tuple(self._keys),
            "deleted_limits": tuple(self._limits),
        }
        self.apply(msgspec.structs.replace(everything, **gone))

    def apply(self, changes: DirectoryChanges) -> None:
        """Applies changes; they take effect with the next request."""
        for tenant_id in changes.deleted_tenants:
            self._set_tenant(tenant_id, None)
        for tenant in changes.tenants:
            self._set_tenant(tenant.id, tenant)
        for public_id in changes.deleted_keys:
            self._set_key(public_id, None)
        for key in changes.keys:
            self._set_key(key.id, key)
        self._set_limits(changes.limits, changes.deleted_limits)
        self.version = changes.version

    def _set_tenant(self, tenant_id: str, tenant: Tenant | None) -> None:
        before = self._tenants.pop(tenant_id, None)
        if before is not None and before.parent is not None:
            _discard(self._teams, before.parent, tenant_id)
        if tenant is not None:
            self._tenants[tenant_id] = tenant
            if tenant.parent is not None:
                self._teams.setdefault(tenant.parent, set()).add(tenant_id)
        self._forget_below(tenant_id)

    def _forget_below(self, tenant_id: str) -> None:
        """Drops the cached settings of a tenant and of its descendants."""
        reached = {tenant_id}
        waiting = [tenant_id]
        while waiting:
            current = waiting.pop()
            self._paths.pop(current, None)
            for public_id in self._members.get(current, ()):
                self._principals.pop(public_id, None)
            below = self._teams.get(current, set()) - reached
            reached |= below
            waiting += below

    def _set_key(self, public_id: str, key: ApiKey | None) -> None:
        before = self._keys.pop(public_id, None)
        if before is not None:
            _discard(self._members, before.tenant, public_id)
        if key is not None:
            self._keys[public_id] = key
            self._members.setdefault(key.tenant, set()).add(public_id)
        self._principals.pop(public_id, None)

    def _set_limits(self, changed: Iterable[Limit], deleted: Iterable[str]) -> None:
        """Rebuilds the limits of each changed subject once, for any number of changes."""
        pages: dict[str, dict[str, Limit]] = {}

        def page(subject: str) -> dict[str, Limit]:
            if subject not in pages:
                pages[subject] = {limit.id: limit for limit in self._book.get(subject, ())}
            return pages[subject]

        for limit_id in deleted:
            gone = self._limits.pop(limit_id, None)
            if gone is not None:
                del page(gone.subject)[limit_id]
        for limit in changed:
            before = self._limits.get(limit.id)
            if before is not None and before.subject != limit.subject:
                del page(before.subject)[limit.id]
            self._limits[limit.id] = limit
            page(limit.subject)[limit.id] = limit  # the limit keeps its position
        self.edition += bool(pages)
        for subject, limits in pages.items():
            if limits:
                self._book[subject] = tuple(limits.values())
            else:
                self._book.pop(subject, None)

    def _path(self, tenant_id: str) -> _Path | None:
        """Combines the settings of a tenant and its ancestors. The narrower of two rules wins; tags add up."""
        chain: list[Tenant] = []
        current: str | None = tenant_id
        while current is not None:
            tenant = self._tenants.get(current)
            if tenant is None or tenant.disabled or tenant in chain:
                return None
            chain.append(tenant)
            current = tenant.parent
        ceilings = [tenant.priority_ceiling for tenant in chain if tenant.priority_ceiling is not None]
        return _Path(
            tenants=tuple(tenant.id for tenant in chain),
            models=_common(tenant.models for tenant in chain),
            regions=_common(tenant.regions or None for tenant in chain),
            tags=frozenset(tag for tenant in chain for tag in tenant.tags),
            priority_ceiling=min(ceilings, default=HIGHEST_PRIORITY),
            shares=tuple(FlowLevel(tenant.id, tenant.weight) for tenant in reversed(chain)),
        )


def _common(allowed: Iterable[Sequence[str] | None]) -> frozenset[str] | None:
    """Returns the names that all lists allow; None if there is no list. Disjoint lists allow no name."""
    name_sets = [frozenset(names) for names in allowed if names is not None]
    return frozenset.intersection(*name_sets) if name_sets else None


def _discard(index: dict[str, set[str]], name: str, member: str) -> None:
    members = index.get(name, set())
    members.discard(member)
    if not members:
        index.pop(name, None)
