"""All tenants, keys and limits in memory, and what they add up to for one key.

A request looks a key up in dictionaries and waits for nobody. What the tenants on the way up to the organisation say
is combined once, the first time that a key of theirs is used, and again only when one of them has changed.
"""

from collections.abc import Iterable, Sequence

import msgspec

from maitred.core.flow import HIGHEST_PRIORITY, FlowLevel
from maitred.core.limits import Limit
from maitred.core.tenancy import ApiKey, DirectoryChanges, Principal, Scope, Tenant


class _Path(msgspec.Struct, frozen=True):
    """Settings that a tenant and everything above it have together; all keys of the tenant share them."""

    tenants: tuple[str, ...]
    models: frozenset[str] | None
    regions: frozenset[str] | None
    tags: frozenset[str]
    priority_ceiling: int
    shares: tuple[FlowLevel, ...]


class Directory:
    """Everything that a gateway knows of its callers. Implements `maitred.core.limits.LimitSource`.

    Attributes:
        version: Of the source, up to which everything is known; 0 before anything is.
        edition: See `LimitSource.edition`. Goes on counting where a restored source begins again.
    """

    def __init__(self) -> None:
        self.version = 0
        self.edition = 0
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, ApiKey] = {}
        self._limits: dict[str, Limit] = {}
        self._teams: dict[str, set[str]] = {}
        """Tenant -> the tenants right below it."""
        self._members: dict[str, set[str]] = {}
        """Tenant -> its keys."""
        self._book: dict[str, tuple[Limit, ...]] = {}
        """Subject -> its limits."""
        self._paths: dict[str, _Path | None] = {}
        self._principals: dict[str, tuple[ApiKey, Principal | None]] = {}

    def key(self, public_id: str) -> ApiKey | None:
        """The key of this public id."""
        return self._keys.get(public_id)

    def tenant(self, tenant_id: str) -> Tenant | None:
        """The organisation or team of this id."""
        return self._tenants.get(tenant_id)

    def anyone_with(self, scope: Scope) -> bool:
        """Whether there is a key of this scope that is not revoked."""
        return any(scope in key.scopes and not key.revoked for key in self._keys.values())

    def limits_of(self, subject: str) -> Sequence[Limit]:
        """Returns the limits of a subject; implements `LimitSource`."""
        return self._book.get(subject, ())

    def principal_for(self, key: ApiKey) -> Principal | None:
        """Returns the principal of a key; None if it is revoked, or a tenant above it is disabled or does not exist.

        Says nothing of expiry, which depends on the time.
        """
        known = self._principals.get(key.id)
        if known is not None and known[0] is key:
            return known[1]
        principal = None
        if not key.revoked:
            principal = self.principal_in(key.tenant, key=key.id, scopes=frozenset(key.scopes))
        if self._keys.get(key.id) is key:
            self._principals[key.id] = (key, principal)
        return principal

    def is_still_valid(self, principal: Principal) -> bool:
        """Whether `principal_for` gave this very one, and would again: nothing of its key or its tenants has changed.

        Nor will anything by itself, so whoever has proved to hold the key's secret still holds it.
        """
        key, known = self._principals.get(principal.key, (None, None))
        return known is principal and key is not None and key.lasting

    def principal_in(self, tenant_id: str, *, key: str, scopes: frozenset[Scope]) -> Principal | None:
        """Someone who belongs to a tenant, whatever it was that proved it; None as for `principal_for`."""
        if tenant_id in self._paths:
            path = self._paths[tenant_id]
        else:
            path = self._path(tenant_id)
            if tenant_id in self._tenants:  # a name that some token made up is not kept
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
        )

    def replace(self, everything: DirectoryChanges) -> None:
        """Forgets what is not part of `everything`."""
        gone = {
            "deleted_tenants": tuple(self._tenants),
            "deleted_keys": tuple(self._keys),
            "deleted_limits": tuple(self._limits),
        }
        self.apply(msgspec.structs.replace(everything, **gone))

    def apply(self, changes: DirectoryChanges) -> None:
        """Takes over what has changed; from the next request on it holds."""
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
        """Forgets the combined settings of a tenant and of those below it."""
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
        """Each subject's limits are put together once, however many of them have changed."""
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
            page(limit.subject)[limit.id] = limit  # in the place that it had
        self.edition += bool(pages)
        for subject, limits in pages.items():
            if limits:
                self._book[subject] = tuple(limits.values())
            else:
                self._book.pop(subject, None)

    def _path(self, tenant_id: str) -> _Path | None:
        """Combines what holds on the way up. The narrower of two rules wins; tags add up."""
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
    """Returns the names that all lists allow; None if there is no list. With nothing in common nothing is allowed."""
    name_sets = [frozenset(names) for names in allowed if names is not None]
    return frozenset.intersection(*name_sets) if name_sets else None


def _discard(index: dict[str, set[str]], name: str, member: str) -> None:
    members = index.get(name, set())
    members.discard(member)
    if not members:
        index.pop(name, None)
