"""Checks of declared tenants, keys and limits beyond the types of the settings.

The rules are those of the store, so that a valid declaration can be stored.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime

from maitred.core.limits import LimitKind
from maitred.core.tenancy import is_id
from maitred.identity.config import IdentityConfig
from maitred.identity.declared_config import KeyConfig, LimitsConfig, ModelLimitsConfig, OrganisationConfig, TeamConfig
from maitred.identity.keys import foreign_id, hash_secret, parse, parse_foreign

_LONGEST_TEXT = 256
Fault = tuple[str, str]
"""Dotted name of a setting, and the description of its fault."""


def declaration_faults(tenants: Mapping[str, OrganisationConfig], identity: IdentityConfig) -> Iterator[Fault]:
    """Yields the faults: invalid or duplicate ids, invalid keys, and settings without effect."""
    for name in ("limits", "limits_per_tenant", "limits_per_key"):
        yield from _limit_faults(f"identity.{name}", getattr(identity, name))
    places: dict[str, str] = {}
    owners: dict[str, str] = {}
    for tenant_id, place, _, config in each_tenant(tenants):
        if not is_id(tenant_id):
            yield (
                place,
                "An id is made of lower-case letters, digits, `-` and `_`, begins with a letter or a digit, and has at "
                "most 63 characters. Rename it.",
            )
        elif tenant_id in places:
            yield place, f"This id is taken by {places[tenant_id]}. Give one of them another."
        places.setdefault(tenant_id, place)
        yield from _text_faults(place, config)
        yield from _limit_faults(f"{place}.limits", config.limits)
        for name, key in config.keys.items():
            key_place = f"{place}.keys.{name}"
            if fault := _key_fault(key):
                yield f"{key_place}.secret", fault
            elif (public_id := declared_key(key)[0]) in owners:
                yield f"{key_place}.secret", f"This key is that of {owners[public_id]} too. Make another."
            else:
                owners[public_id] = key_place
            if key.expires_at is not None and not _is_time(key.expires_at):
                yield f"{key_place}.expires_at", "It is no time with its zone, such as 2027-01-01T00:00:00Z."
            if not key.scopes:
                yield f"{key_place}.scopes", "A key without a scope can be used for nothing. Give it one."
            yield from _limit_faults(f"{key_place}.limits", key.limits)


def each_tenant(
    tenants: Mapping[str, OrganisationConfig],
) -> Iterator[tuple[str, str, str | None, TeamConfig]]:
    """Yields id, place, parent and settings of every tenant, organisations before teams."""
    for organisation_id, organisation in tenants.items():
        yield organisation_id, f"tenants.{organisation_id}", None, organisation
        for team_id, team in organisation.teams.items():
            yield team_id, f"tenants.{organisation_id}.teams.{team_id}", organisation_id, team


def declared_key(key: KeyConfig) -> tuple[str, bytes]:
    """Returns the public id of a declared key without faults, and the SHA-256 of its secret."""
    if key.sha256 is not None:
        sha256 = bytes.fromhex(key.sha256)
        return foreign_id(sha256), sha256
    assert key.secret is not None, "declaration_faults() has looked"
    parsed = (parse_foreign if key.foreign else parse)(key.secret.reveal())
    assert parsed is not None, "declaration_faults() has looked"
    return parsed[0], hash_secret(parsed[1])


def _key_fault(key: KeyConfig) -> str:
    """Returns why a key cannot be used; empty: it can."""
    if (key.secret is None) == (key.sha256 is None):
        return "A key is given by its `secret`, or by its `sha256`. Give one of the two."
    if key.secret is None:
        return ""
    if key.foreign:
        is_usable = parse_foreign(key.secret.reveal()) is not None
        return "" if is_usable else f"{key.secret.reference} is one of our own keys, or too long. Leave out `foreign`."
    if parse(key.secret.reveal()) is None:
        return (
            f"{key.secret.reference} does not hold a whole key, as `sk-mtd-<id>-<secret>`. If another gateway has made "
            "it, set `foreign`."
        )
    return ""


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _limit_faults(place: str, config: LimitsConfig) -> Iterator[Fault]:
    yield from _burst_faults(place, config)
    for model, of_model in config.models.items():
        if not _is_text(model):
            yield f"{place}.models.{model}", _TEXT_RULE
        yield from _burst_faults(f"{place}.models.{model}", of_model)


def _burst_faults(place: str, config: ModelLimitsConfig) -> Iterator[Fault]:
    for kind in LimitKind:
        if kind.per_minute and getattr(config.burst, kind) is not None and getattr(config, kind) is None:
            yield f"{place}.burst.{kind}", f"A burst is of a limit, and {place}.{kind} is not set. Set it too."


_TEXT_RULE = f"A name has from 1 to {_LONGEST_TEXT} printable characters."


def _text_faults(place: str, config: TeamConfig) -> Iterator[Fault]:
    if config.name and not _is_text(config.name):
        yield f"{place}.name", _TEXT_RULE
    for setting, words in (("models", config.models or ()), ("regions", config.regions), ("tags", config.tags)):
        if not all(map(_is_text, words)):
            yield f"{place}.{setting}", _TEXT_RULE
    for name in config.keys:
        if not _is_text(name):
            yield f"{place}.keys.{name}", _TEXT_RULE


def _is_text(text: str) -> bool:
    return 0 < len(text) <= _LONGEST_TEXT and text.isprintable()
