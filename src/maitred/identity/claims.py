"""Reads the claims of a token about its bearer, by the configured rules. It checks no signature."""

import hashlib
import math
import re
from collections.abc import Mapping

from maitred.core.tenancy import Scope
from maitred.identity.config import OidcConfig

_SAFE_SUBJECT = re.compile(r"[A-Za-z0-9_.:@|+=/-]{1,128}")
_FARTHEST_S = 1e15
Claims = Mapping[str, object]


def live(claims: Claims, now_s: float, leeway_s: float) -> bool:
    """Whether the token is valid at this time; a token without an end is refused."""
    ends_s = _time(claims.get("exp"))
    begins_s = _time(claims["nbf"]) if "nbf" in claims else -math.inf
    return ends_s is not None and begins_s is not None and begins_s - leeway_s <= now_s < ends_s + leeway_s


def read_tenants(claims: Claims, config: OidcConfig) -> list[str]:
    """Returns the bearer's possible tenants, first choice first, without a check that they exist."""
    claimed = _claim(claims, config.tenant_claim)
    if claimed is None:
        return [] if config.default_tenant is None else [config.default_tenant]
    values = claimed if isinstance(claimed, list) else [claimed]
    names = [value for value in values if isinstance(value, str)]
    return [config.tenants[name] for name in names if name in config.tenants] if config.tenants else names


def read_scopes(claims: Claims, config: OidcConfig) -> frozenset[Scope]:
    """Returns the scopes that the bearer has."""
    claimed = _claim(claims, config.scope_claim)
    words = claimed.split() if isinstance(claimed, str) else claimed if isinstance(claimed, list) else []
    given = {config.scopes[word] for word in words if isinstance(word, str) and word in config.scopes}
    return frozenset(Scope(scope) for scope in given or config.default_scopes)


def read_key(issuer: str, claims: Claims) -> str | None:
    """Returns the key for usage and limits: ``<issuer>:<subject>``; None without a subject.

    The key is short and printable: a long or unusual subject is replaced by its hash and never cut, so that two bearers
    never share a key.
    """
    subject = claims.get("sub")
    if not isinstance(subject, str) or not subject:
        return None
    if not _SAFE_SUBJECT.fullmatch(subject):
        subject = "~" + hashlib.sha256(subject.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{issuer}:{subject}"


def _claim(claims: Claims, name: str) -> object:
    """Returns a claim by its name, which may contain dots, or by its path."""
    if name in claims:
        return claims[name]
    value: object = claims
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _time(value: object) -> float | None:
    """Returns seconds since 1970; None for an invalid date, such as NaN or a 1,000-digit number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and -_FARTHEST_S < value < _FARTHEST_S:
        return value
    return None
