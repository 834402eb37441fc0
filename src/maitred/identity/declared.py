"""The tenants, keys and limits that the configuration declares, as a store keeps them.

Ids depend on nothing but what is declared, so that declaring the same again changes nothing.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping

import msgspec

from maitred.core.errors import ConfigInvalid
from maitred.core.limits import Limit, LimitKind
from maitred.core.money import nusd_of
from maitred.core.tenancy import ApiKey, KeySecret, Scope, Tenant
from maitred.identity.config import IdentityConfig
from maitred.identity.declared_config import KeyConfig, LimitsConfig, ModelLimitsConfig, OrganisationConfig, TeamConfig
from maitred.identity.keys import hash_of, parse

_TENANT_ID = re.compile(r"[a-z0-9_-]{1,64}")
Fault = tuple[str, str]
"""The dotted name of a setting, and what is wrong with it."""


class Declared(msgspec.Struct, frozen=True):
    """What a configuration declares. Parents come before their teams."""

    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]
    limits: tuple[Limit, ...]


def declared(tenants: Mapping[str, OrganisationConfig], identity: IdentityConfig | None = None) -> Declared:
    """Everything that the two sections declare.

    Args:
        tenants: The section `tenants`.
        identity: The section `identity`, for the limits that hold for everybody.

    Raises:
        ConfigInvalid: The message lists every fault. `tenant_faults` finds the same ones.
    """
    faults = list(tenant_faults(tenants))
    if faults:
        raise ConfigInvalid(
            "\n".join(["The declared tenants have faults:", *(f"  {key}: {text}" for key, text in faults)])
        )
    found: list[Tenant] = []
    keys: list[ApiKey] = []
    limits: list[Limit] = []
    if identity is not None:
        limits += _limits("*", identity.limits)
        limits += _limits("tenant:*", identity.limits_per_tenant)
        limits += _limits("key:*", identity.limits_per_key)
    for tenant_id, _, parent, config in _each(tenants):
        found.append(_tenant(tenant_id, parent, config))
        limits += _limits(f"tenant:{tenant_id}", config.limits)
        for name, key_config in config.keys.items():
            key = _key(tenant_id, name, key_config)
            keys.append(key)
            limits += _limits(f"key:{key.id}", key_config.limits)
    return Declared(tuple(found), tuple(keys), tuple(limits))


def tenant_faults(tenants: Mapping[str, OrganisationConfig]) -> Iterator[Fault]:
    """What the types of the section cannot say: ids that fit, that differ, and keys that are keys."""
    places: dict[str, str] = {}
    holders: dict[str, str] = {}
    for tenant_id, place, _, config in _each(tenants):
        if not _TENANT_ID.fullmatch(tenant_id):
            yield place, "An id has 1 to 64 lower-case letters, digits, `-` and `_`. Rename it."
        elif tenant_id in places:
            yield place, f"This id is taken by {places[tenant_id]}. Give one of them another."
        places.setdefault(tenant_id, place)
        for name, key in config.keys.items():
            parsed = parse(key.secret.reveal())
            secret_place = f"{place}.keys.{name}.secret"
            if parsed is None:
                yield secret_place, f"{key.secret.reference} does not hold a whole key, as `sk-mtd-<id>-<secret>`."
            elif parsed[0] in holders:
                yield secret_place, f"This key is that of {holders[parsed[0]]} too. Make another."
            else:
                holders[parsed[0]] = secret_place


def _each(
    tenants: Mapping[str, OrganisationConfig],
) -> Iterator[tuple[str, str, str | None, TeamConfig]]:
    """Id, place in the configuration, parent and settings of every tenant."""
    for organisation_id, organisation in tenants.items():
        yield organisation_id, f"tenants.{organisation_id}", None, organisation
        for team_id, team in organisation.teams.items():
            yield team_id, f"tenants.{organisation_id}.teams.{team_id}", organisation_id, team


def _tenant(tenant_id: str, parent: str | None, config: TeamConfig) -> Tenant:
    return Tenant(
        id=tenant_id,
        parent=parent,
        name=config.name or tenant_id,
        weight=config.weight,
        models=config.models,
        priority_ceiling=config.priority_ceiling,
        regions=config.regions,
        tags=config.tags,
        disabled=config.disabled,
    )


def _key(tenant_id: str, name: str, config: KeyConfig) -> ApiKey:
    parsed = parse(config.secret.reveal())
    assert parsed is not None, "tenant_faults() has looked"
    public_id, secret = parsed
    scopes = tuple(Scope(scope) for scope in config.scopes)
    return ApiKey(id=public_id, tenant=tenant_id, name=name, scopes=scopes, secrets=(KeySecret(hash_of(secret)),))


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
        value=nusd_of(value) if kind.spend else int(value),
        model=model,
        burst=burst,
        hard=hard,
    )
