"""Rules for well-typed tenants, keys and limits, and their conversion to the types of `core`.

A message names the field, the rule and the value. Rules that need the store (such as whether a tenant exists) are in
the store.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from maitred.core.errors import InvalidRequest
from maitred.core.limits import Limit
from maitred.core.tenancy import ID_PATTERN, CacheDirective, Scope, Tenant, is_id
from maitred.core.usage import to_nano_usd
from maitred.wire.admin.requests import (
    BudgetsQuery,
    CreateKey,
    CreateLimit,
    CreateTenant,
    KeysQuery,
    LimitsQuery,
    RotateKey,
    TenantsQuery,
    Time,
    UpdateKey,
    UpdateTenant,
    UsageEventsQuery,
    UsageQuery,
)
from maitred.wire.admin.semantic import LabelledPairsQuery, SemanticScopesQuery
from maitred.wire.admin.times import parse_time
from maitred.wire.openai.decode import FieldSchema, NumberRange
from maitred.wire.openai.faults import format_value

MAX_NAME_CHARACTERS = 200
MAX_FILTER_CHARACTERS = 256
"""Largest length of the name of a model, or of a filter."""
MAX_CURSOR_CHARACTERS = 512
MAX_MODELS = 1000
MAX_WORDS = 64
"""Largest number of regions, and of tags, of one tenant."""
MAX_COUNT = 10**12
MAX_USD = 9_000_000
"""Largest value of a limit in dollars.

In nano-dollars this value is just below 2^53, the bound up to which the doubles of shared counters are exact.
"""
MAX_OVERLAP_S = 90 * 86_400

_KEY_ID = re.compile(r"[a-z0-9]{16}", re.ASCII)
WORD_PATTERN = "[A-Za-z0-9][A-Za-z0-9._:-]{0,62}"
_WORD = re.compile(WORD_PATTERN, re.ASCII)
_NUMBER_CURSOR = re.compile(r"\d{1,18}", re.ASCII)
"""Ids of a database that only grow are below 2^63."""
_WEIGHT = NumberRange(0.001, 1000)
_PRIORITY = NumberRange(1, 10)
_COUNT = NumberRange(1, MAX_COUNT)
_USD = NumberRange(0, MAX_USD, excludes_low=True)
_OVERLAP = NumberRange(0, MAX_OVERLAP_S)
_PAGE = NumberRange(1, 500)


def is_key_id(text: str) -> bool:
    """Returns whether the text is a valid public id of a key."""
    return _KEY_ID.fullmatch(text) is not None


def check_id(field: str, text: str) -> None:
    """Raises InvalidRequest unless the text is a valid id of a tenant or a limit."""
    if not is_id(text):
        raise InvalidRequest(
            f"{field} must be 1 to 63 lower-case letters, digits, '-' and '_', the first a letter or a digit; got "
            f"{format_value(text)}.",
            param=field,
        )


def check_key_id(field: str, text: str) -> None:
    """Raises InvalidRequest unless the text is a valid public id of a key."""
    if not is_key_id(text):
        raise InvalidRequest(
            f"{field} must be 16 lower-case letters and digits; got {format_value(text)}.", param=field
        )


def check_name(name: str) -> None:
    """Raises InvalidRequest for a name that cannot be shown in a table."""
    _check_text("name", name, MAX_NAME_CHARACTERS)


def check_page(limit: int, after: str) -> None:
    """Raises InvalidRequest for a page size or a cursor out of range."""
    _PAGE.check("limit", limit)
    _check_text("after", after, MAX_CURSOR_CHARACTERS)


def check_number_cursor(after: str) -> None:
    """Raises InvalidRequest for a cursor that is no number."""
    if after and not _NUMBER_CURSOR.fullmatch(after):
        raise InvalidRequest(f"after must be `next` of another page; got {format_value(after)}.", param="after")


def check_filter(field: str, name: str) -> None:
    """Raises InvalidRequest for a filter that matches no ledger entry."""
    _check_text(field, name, MAX_FILTER_CHARACTERS, empty=False)


def check_subject(subject: str) -> None:
    """Raises InvalidRequest unless the subject can have limits."""
    subject_kind, _, name = subject.partition(":")
    if subject in ("*", "tenant:*", "key:*") or (subject_kind in ("tenant", "key") and is_id(name)):
        return
    raise InvalidRequest(
        f"subject must be tenant:<id>, key:<id>, tenant:*, key:* or *; got {format_value(subject)}.", param="subject"
    )


def to_tenant(request: CreateTenant) -> Tenant:
    """Checks a request and returns the tenant to create.

    Raises:
        InvalidRequest: A field is out of range.
    """
    check_id("id", request.id)
    if request.parent is not None:
        check_id("parent", request.parent)
        if request.parent == request.id:
            raise InvalidRequest("parent must be another tenant than the one it is the parent of.", param="parent")
    fields = tenant_changes(UpdateTenant(**{name: getattr(request, name) for name in UpdateTenant.__struct_fields__}))
    return Tenant(id=request.id, parent=request.parent, **fields)


def tenant_changes(request: UpdateTenant) -> dict[str, Any]:
    """Checks a request and returns the fields to change, as `Tenant` has them.

    Raises:
        InvalidRequest: A field is out of range.
    """
    changes: dict[str, Any] = {
        name: getattr(request, name) for name in request.__struct_fields__ if getattr(request, name) is not UNSET
    }
    if "name" in changes:
        check_name(changes["name"])
    _check_number(_WEIGHT, "weight", changes.get("weight"))
    _PRIORITY.check("priority_ceiling", changes.get("priority_ceiling"))
    if changes.get("models") is not None:
        check_count("models", changes["models"], MAX_MODELS)
        for position, model in enumerate(changes["models"]):
            _check_text(f"models[{position}]", model, MAX_FILTER_CHARACTERS, empty=False)
    for field in ("regions", "tags"):
        check_count(field, changes.get(field, ()), MAX_WORDS)
        for position, word in enumerate(changes.get(field, ())):
            check_word(f"{field}[{position}]", word)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}


def parse_scopes(scopes: Sequence[Scope]) -> tuple[Scope, ...]:
    """Returns the scopes of a key, without duplicates.

    Raises:
        InvalidRequest: The list of scopes is empty.
    """
    if not scopes:
        raise InvalidRequest("scopes must name at least one of inference, metrics and admin.", param="scopes")
    return tuple(scope for scope in Scope if scope in scopes)


def parse_cache_controls(controls: Sequence[CacheDirective] | None) -> tuple[CacheDirective, ...] | None:
    """Returns the cache controls of a key, without duplicates; None: those that the configuration allows."""
    return None if controls is None else tuple(control for control in CacheDirective if control in controls)


def parse_expiry(value: Time | None, now_s: float) -> float | None:
    """Returns the time at which a key expires.

    Raises:
        InvalidRequest: The value is not a time, or is in the past.
    """
    if value is None:
        return None
    expires_s = parse_time("expires_at", value)
    if expires_s <= now_s:
        raise InvalidRequest(
            "expires_at must lie in the future. Name a later time; a key that must stop now is revoked.",
            param="expires_at",
        )
    return expires_s


def parse_overlap(request: RotateKey) -> float:
    """Returns how long the old secret of a rotated key stays valid, in seconds.

    Raises:
        InvalidRequest: The value is out of range.
    """
    _check_number(_OVERLAP, "overlap_s", request.overlap_s)
    return float(request.overlap_s)


def to_limit(request: CreateLimit, limit_id: str) -> Limit:
    """Checks a request and returns the limit to create.

    Raises:
        InvalidRequest: A field is out of range, or has no meaning for this kind of limit.
    """
    kind = request.kind
    check_id("id", limit_id)
    check_subject(request.subject)
    if request.model is not None:
        _check_text("model", request.model, MAX_FILTER_CHARACTERS, empty=False)
    if kind.spend:
        _check_number(_USD, "value", request.value)
        value = to_nano_usd(request.value)
        if value == 0:
            raise InvalidRequest(
                f"value must be at least a nano-dollar; got {format_value(request.value)}.", param="value"
            )
    else:
        value = _whole_number(request.value, kind)
    if request.burst is not None:
        if not kind.per_minute:
            raise InvalidRequest(f"burst is only for limits per minute. Remove it from {kind}.", param="burst")
        _COUNT.check("burst", request.burst)
    if not request.hard and not kind.spend:
        raise InvalidRequest(f"hard can be false for budgets only. Remove it from {kind}.", param="hard")
    return Limit(
        id=limit_id,
        subject=request.subject,
        kind=kind,
        value=value,
        model=request.model,
        burst=request.burst,
        hard=request.hard,
    )


def _whole_number(value: float, kind: str) -> int:
    _check_number(_COUNT, "value", value)
    if value != int(value):
        raise InvalidRequest(f"value must be a whole number for {kind}; got {format_value(value)}.", param="value")
    return int(value)


def _check_number(bounds: NumberRange, field: str, value: float | None) -> None:
    # Every comparison with NaN is false, so a range check would accept it.
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{field} must be a number; got {format_value(value)}.", param=field)
    bounds.check(field, value)


def check_count(field: str, entries: Sequence[str], most: int) -> None:
    """Raises InvalidRequest for a list that is too long."""
    if len(entries) > most:
        raise InvalidRequest(f"{field} must have at most {most} entries; got {len(entries)}.", param=field)


def check_word(field: str, word: str) -> None:
    """Raises InvalidRequest unless the word is a valid region or tag."""
    if _WORD.fullmatch(word) is None:
        raise InvalidRequest(
            f"{field} must be 1 to 63 letters, digits, '.', '_', ':' and '-'; got {format_value(word)}.", param=field
        )


def _check_text(field: str, text: str, most: int, *, empty: bool = True) -> None:
    if not text and not empty:
        raise InvalidRequest(f"{field} must not be empty.", param=field)
    if len(text) > most:
        raise InvalidRequest(f"{field} must have at most {most} characters; got {len(text)}.", param=field)
    if not text.isprintable():
        raise InvalidRequest(f"{field} must be one line of printable text.", param=field)


def body_schemas() -> dict[type, dict[str, FieldSchema]]:
    """Returns the rules of single fields as JSON Schema, as `maitred.wire.openai.decode.body_schemas` does.

    The structs are bodies, and the queries of lists.
    """
    tenant_id, key_id, word = ({"pattern": f"^{pattern}$"} for pattern in (ID_PATTERN, _KEY_ID.pattern, WORD_PATTERN))
    name = {"maxLength": MAX_NAME_CHARACTERS}
    model = {"minLength": 1, "maxLength": MAX_FILTER_CHARACTERS}
    words = {"maxItems": MAX_WORDS, "items": word}
    subject = {"pattern": rf"^(\*|(tenant|key):(\*|{ID_PATTERN}))$"}
    tenant: dict[str, FieldSchema] = {
        "name": name,
        "weight": _WEIGHT.schema(),
        "priority_ceiling": _PRIORITY.schema(),
        "models": {"maxItems": MAX_MODELS, "items": model},
        "regions": words,
        "tags": words,
    }
    scopes = {"minItems": 1}
    page: dict[str, FieldSchema] = {"limit": _PAGE.schema(), "after": {"maxLength": MAX_CURSOR_CHARACTERS}}
    filters = dict.fromkeys(
        ("organisation", "tenant", "key", "model", "rollout", "outcome", "cache", "request_id"), model
    )
    return {
        CreateTenant: {**tenant, "id": tenant_id, "parent": tenant_id},
        UpdateTenant: tenant,
        CreateKey: {"tenant": tenant_id, "id": key_id, "name": name, "scopes": scopes},
        UpdateKey: {"name": name, "scopes": scopes},
        RotateKey: {"overlap_s": _OVERLAP.schema()},
        CreateLimit: {
            "subject": subject,
            "value": {"exclusiveMinimum": 0, "maximum": MAX_COUNT},
            "id": tenant_id,
            "model": model,
            "burst": _COUNT.schema(),
        },
        TenantsQuery: {**page, "parent": tenant_id},
        KeysQuery: {**page, "tenant": tenant_id},
        LimitsQuery: {**page, "subject": subject},
        BudgetsQuery: {**page, "subject": subject},
        UsageQuery: {**page, **filters},
        UsageEventsQuery: {**page, **filters},
        SemanticScopesQuery: page,
        LabelledPairsQuery: page,
    }
