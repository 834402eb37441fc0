"""Checks of declared tenants, keys and limits beyond the types of the settings.

The rules are those of the store, so that a valid declaration can be stored.
"""

from collections.abc import Iterator, Mapping

from maitred.core.limits import LimitKind
from maitred.core.tenancy import is_id
from maitred.identity.config import IdentityConfig
from maitred.identity.declared_config import LimitsConfig, ModelLimitsConfig, OrganisationConfig, TeamConfig
from maitred.identity.keys import parse

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
            parsed = parse(key.secret.reveal())
            if parsed is None:
                yield (
                    f"{key_place}.secret",
                    f"{key.secret.reference} does not hold a whole key, as `sk-mtd-<id>-<secret>`.",
                )
            elif parsed[0] in owners:
                yield f"{key_place}.secret", f"This key is that of {owners[parsed[0]]} too. Make another."
            else:
                owners[parsed[0]] = key_place
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
