"""Rules for a single tenant, key or limit, as pure functions that raise `InvalidRequest`."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.limits import Limit
from maitred.core.tenancy import ApiKey, Tenant, is_id

MAX_PAGE_SIZE = 1000
_MAX_EXACT_INTEGER = 2**53 - 1
"""Largest integer that is exact both in Redis and in the JSON of many clients."""
_MAX_TEXT_LENGTH = 256
_MAX_ENTRIES = 1000
_MAX_WEIGHT = 1000
_MAX_OVERLAP_S = 90 * 86400.0

Entity = TypeVar("Entity", bound=Tenant | ApiKey | Limit)


def check_tenant(tenant: Tenant) -> None:
    """Checks the fields of a tenant; the store checks whether its parent exists."""
    _check_types(tenant)
    _check_id("id", tenant.id)
    if tenant.parent is not None:
        _check_id("parent", tenant.parent)
        if tenant.parent == tenant.id:
            raise InvalidRequest("A tenant cannot be its own parent.", param="parent")
    _check_text("name", tenant.name, allow_empty=True)
    if not 0 < tenant.weight <= _MAX_WEIGHT:
        raise InvalidRequest(f"A weight is more than 0 and at most {_MAX_WEIGHT}.", param="weight")
    if tenant.priority_ceiling is not None and not 1 <= tenant.priority_ceiling <= 10:
        raise InvalidRequest("A priority ceiling is from 1 to 10.", param="priority_ceiling")
    for param, texts in (("models", tenant.models or ()), ("regions", tenant.regions), ("tags", tenant.tags)):
        _check_texts(param, texts)


def check_key(key: ApiKey, now_s: float) -> None:
    """Checks the fields of a new key."""
    _check_types(key)
    _check_id("id", key.id)
    _check_id("tenant", key.tenant)
    _check_text("name", key.name, allow_empty=True)
    if not key.scopes or len(set(key.scopes)) != len(key.scopes):
        raise InvalidRequest("A key has at least one scope, and each once.", param="scopes")
    if key.cache_controls is not None and len(set(key.cache_controls)) != len(key.cache_controls):
        raise InvalidRequest("A key has each cache control once.", param="cache_controls")
    _check_expiry("expires_s", key.expires_s, now_s)
    if not key.secrets or len({secret.sha256 for secret in key.secrets}) != len(key.secrets):
        raise InvalidRequest("A key has at least one secret, and each once.", param="secrets")
    for secret in key.secrets:
        check_hash(secret.sha256)
        _check_expiry("secrets", secret.expires_s, now_s)


def check_hash(sha256: bytes) -> None:
    """Checks the stored hash of a secret."""
    if len(sha256) != 32:
        raise InvalidRequest("Of a secret its SHA-256 is kept, which has 32 bytes.", param="secrets")


def check_overlap(overlap_s: float) -> None:
    """Checks the time for which the older secrets of a key stay valid after a rotation."""
    if not 0 <= overlap_s <= _MAX_OVERLAP_S:
        raise InvalidRequest(
            f"An overlap is from 0 to {_MAX_OVERLAP_S:.0f} seconds, that is 90 days.", param="overlap_s"
        )


def check_limit(limit: Limit) -> None:
    """Checks the fields of a limit; the store checks whether its subject exists."""
    _check_types(limit)
    _check_id("id", limit.id)
    check_subject(limit.subject)
    if not 0 < limit.value <= _MAX_EXACT_INTEGER:
        raise InvalidRequest(
            f"A limit is from 1 to {_MAX_EXACT_INTEGER} requests, tokens or nano-dollars.", param="value"
        )
    if limit.model is not None:
        _check_text("model", limit.model)
    if limit.burst is not None:
        if not limit.kind.per_minute:
            raise InvalidRequest(
                f"Only a rate has a burst, and {limit.kind} is none. Leave `burst` out.", param="burst"
            )
        if not 0 < limit.burst <= _MAX_EXACT_INTEGER:
            raise InvalidRequest(f"A burst is from 1 to {_MAX_EXACT_INTEGER}.", param="burst")
    if not limit.hard and not limit.kind.spend:
        raise InvalidRequest(f"Only a budget can be soft, and {limit.kind} is none. Leave `hard` out.", param="hard")


def check_subject(subject: str) -> None:
    """Checks the subject of a limit, which names the owner of the limit."""
    if subject == "*":
        return
    sort, colon, name = subject.partition(":")
    if not (colon and sort in ("tenant", "key") and (name == "*" or is_id(name))):
        raise InvalidRequest(
            "A subject is `tenant:<id>`, `key:<id>`, `tenant:*`, `key:*`, or `*` for the whole installation.",
            param="subject",
        )


def check_page(after: str, limit: int) -> None:
    """Checks the start and the length of a page."""
    if after and not is_id(after):
        raise InvalidRequest("`after` is the last id of the page before.", param="after")
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise InvalidRequest(f"A page has from 1 to {MAX_PAGE_SIZE} entries.", param="limit")


def apply_changes(entity: Entity, changes: Mapping[str, object], mutable_fields: frozenset[str]) -> Entity:
    """Returns a copy of an entity with some fields changed.

    The values may be JSON values or values of the struct.
    """
    for field in changes:
        if field not in mutable_fields:
            raise InvalidRequest(
                f"This cannot be changed afterwards. What can: {', '.join(sorted(mutable_fields))}.", param=field
            )
    return _convert(entity, changes)


def _check_types(entity: Tenant | ApiKey | Limit) -> None:
    """Checks the types of all fields.

    Structs accept any value, and a value of the wrong type would cause a database error later.
    """
    _convert(entity, {})


def _convert(entity: Entity, changes: Mapping[str, object]) -> Entity:
    try:
        return msgspec.convert({**msgspec.to_builtins(entity), **msgspec.to_builtins(changes)}, type(entity))
    except TypeError:
        raise InvalidRequest("A field has a value of the wrong type.") from None
    except msgspec.ValidationError as error:
        sentence, _, path = str(error).partition(" - at ")
        raise InvalidRequest(
            f"{sentence}.", param=path.strip("`").removeprefix("$").removeprefix(".") or None
        ) from None


def _check_id(param: str, text: str) -> None:
    if not is_id(text):
        raise InvalidRequest(
            "An id is made of lower-case letters, digits, `-` and `_`, begins with a letter or a digit, and has at "
            "most 63 characters.",
            param=param,
        )


def _check_text(param: str, text: str, *, allow_empty: bool = False) -> None:
    if (not text and not allow_empty) or len(text) > _MAX_TEXT_LENGTH or not text.isprintable():
        minimum = "" if allow_empty else "at least one and "
        raise InvalidRequest(f"A text here has {minimum}at most {_MAX_TEXT_LENGTH} printable characters.", param=param)


def _check_texts(param: str, texts: Sequence[str]) -> None:
    if len(texts) > _MAX_ENTRIES:
        raise InvalidRequest(f"A list here has at most {_MAX_ENTRIES} entries.", param=param)
    for number, text in enumerate(texts):
        _check_text(f"{param}[{number}]", text)


def _check_expiry(param: str, expires_s: float | None, now_s: float) -> None:
    if expires_s is not None and not (math.isfinite(expires_s) and expires_s > now_s):
        raise InvalidRequest("The time of expiry must be in the future; seconds since 1970.", param=param)
