"""Tenants, keys and limits from the configuration, in the format of the store.

The ids depend only on the declaration, so a repeated declaration changes nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime

import msgspec

from maitred.core.errors import ConfigInvalid
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import ApiKey, CacheDirective, KeySecret, Scope, Tenant
from maitred.core.usage import to_nano_usd
from maitred.identity.config import IdentityConfig
from maitred.identity.declared_config import KeyConfig, LimitsConfig, ModelLimitsConfig, OrganisationConfig, TeamConfig
from maitred.identity.faults import declaration_faults, declared_key, each_tenant


class DeclaredDirectory(msgspec.Struct, frozen=True):
    """Directory that a configuration declares. Parents come before their teams."""

    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]
    limits: tuple[Limit, ...]


def make_declared_directory(tenants: Mapping[str, OrganisationConfig], identity: IdentityConfig) -> DeclaredDirectory:
    """Makes the directory that the two sections declare.

    Args:
        tenants: The section `tenants`.
        identity: The section `identity`, for the limits of every caller.

    Raises:
        ConfigInvalid: The message lists every fault. `declaration_faults` finds the same ones.
    """
    faults = list(declaration_faults(tenants, identity))
    if faults:
        raise ConfigInvalid(
            "\n".join(["The declared tenants have faults:", *(f"  {key}: {text}" for key, text in faults)])
        )
    found: list[Tenant] = []
    keys: list[ApiKey] = []
    limits: list[Limit] = []
    limits += _limits("*", identity.limits)
    limits += _limits("tenant:*", identity.limits_per_tenant)
    limits += _limits("key:*", identity.limits_per_key)
    for tenant_id, _, parent, config in each_tenant(tenants):
        found.append(_tenant(tenant_id, parent, config))
        limits += _limits(f"tenant:{tenant_id}", config.limits)
        for name, key_config in config.keys.items():
            key = _key(tenant_id, name, key_config)
            keys.append(key)
            limits += _limits(f"key:{key.id}", key_config.limits)
    return DeclaredDirectory(tuple(found), tuple(keys), tuple(limits))


def _tenant(tenant_id: str, parent: str | None, config: TeamConfig) -> Tenant:
    return Tenant(
        id=tenant_id,
        parent=parent,
        name=config.name or tenant_id,
        weight=config.weight,
        models=None if config.models is None else _once(config.models),
        priority_ceiling=config.priority_ceiling,
        regions=_once(config.regions),
        tags=_once(config.tags),
        disabled=config.disabled,
    )


def _key(tenant_id: str, name: str, config: KeyConfig) -> ApiKey:
    public_id, sha256 = declared_key(config)
    scopes = tuple(Scope(scope) for scope in _once(config.scopes))
    controls = config.cache_controls
    return ApiKey(
        id=public_id,
        tenant=tenant_id,
        name=name,
        scopes=scopes,
        secrets=(KeySecret(sha256),),
        expires_s=None if config.expires_at is None else datetime.fromisoformat(config.expires_at).timestamp(),
        cache_controls=None if controls is None else tuple(CacheDirective(name) for name in _once(controls)),
    )


def _limits(subject: str, config: LimitsConfig) -> Iterator[Limit]:
    yield from _model_limits(subject, None, config)
    for model, of_model in config.models.items():
        yield from _model_limits(subject, model, of_model)


def _model_limits(subject: str, model: str | None, config: ModelLimitsConfig) -> Iterator[Limit]:
    for kind in LimitKind:
        value = getattr(config, kind)
        if value is not None:
            burst = getattr(config.burst, kind) if kind.per_minute else None
            yield _limit(subject, model, kind, value, burst=burst)
        if kind.spend and (warned := getattr(config.soft, kind)) is not None:
            yield _limit(subject, model, kind, warned, hard=False)


def _limit(
    subject: str, model: str | None, kind: LimitKind, value: float, *, burst: int | None = None, hard: bool = True
) -> Limit:
    name = msgspec.json.encode([subject, model, kind, hard])
    return Limit(
        id=f"config-{hashlib.sha256(name).hexdigest()[:16]}",
        subject=subject,
        kind=kind,
        value=to_nano_usd(value) if kind.spend else int(value),
        model=model,
        burst=burst,
        hard=hard,
    )


def _once(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the words without duplicates, in order."""
    return tuple(dict.fromkeys(words))
