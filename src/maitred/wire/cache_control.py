"""Cache control of a request: what its caller says about answers from a cache, in the body and in Cache-Control.

Both add up: the answer is computed if one of them asks for that, and the shorter of two ages counts.
"""

import re

from msgspec.structs import replace

from maitred.core.errors import InvalidRequest
from maitred.core.inference import DEFAULT_CACHE_CONTROL, CacheControl
from maitred.wire.openai.decode import MAX_CACHE_S
from maitred.wire.openai.faults import format_value
from maitred.wire.openai.requests import CacheFields

CACHE_CONTROL = "cache-control"
_NOT_STORED = CacheControl(no_store=True)
_DIRECTIVE = re.compile(r'(?:"(?:[^"\\]|\\.)*+"?|[^,"])+')
"""One directive of the list; a comma within a quoted string does not end it."""
_MAX_DIGITS = len(str(MAX_CACHE_S))


def to_cache_control(fields: CacheFields | None, *, store: bool | None = None) -> CacheControl:
    """Returns what a body says about answers from a cache.

    Args:
        fields: Its field `cache`; None: it has none.
        store: Its field `store`; False asks that nothing of the answer is kept.
    """
    if fields is None:
        return _NOT_STORED if store is False else DEFAULT_CACHE_CONTROL
    return CacheControl(
        no_cache=fields.no_cache is True,
        no_store=fields.no_store is True or store is False,
        ttl_s=fields.ttl,
        max_age_s=fields.s_maxage,
        namespace=fields.namespace or "",
    )


def add_directives(control: CacheControl, directives: str) -> CacheControl:
    """Returns a cache control with the directives of the header Cache-Control (RFC 9111, section 5.2.1).

    Directives that say nothing about answers of models, such as ``no-transform``, are left out. A directive that needs
    no argument counts with one, too.

    Args:
        control: What the body says.
        directives: The value of the header; values of several lines with commas between them.

    Raises:
        InvalidRequest: The argument of ``max-age`` is no number of seconds.
    """
    names: set[str] = set()
    max_age_s = control.max_age_s
    for directive in _DIRECTIVE.findall(directives):
        name, _, argument = directive.strip().partition("=")
        names.add(name := name.lower())
        if name == "max-age":
            age_s = _seconds_in(argument)
            max_age_s = age_s if max_age_s is None else min(max_age_s, age_s)
    return replace(
        control,
        no_cache=control.no_cache or "no-cache" in names,
        no_store=control.no_store or "no-store" in names,
        only_if_cached=control.only_if_cached or "only-if-cached" in names,
        max_age_s=max_age_s,
    )


def _seconds_in(argument: str) -> float:
    """Returns seconds as RFC 9111 writes them: digits, also in quotes, and at most 2³¹."""
    digits = argument[1:-1] if len(argument) > 2 and argument[0] == argument[-1] == '"' else argument
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidRequest(
            f"max-age of the header {CACHE_CONTROL} must be a whole number of seconds, 0 or more; got "
            f"{format_value(argument)}.",
            param=CACHE_CONTROL,
        )
    significant = digits.lstrip("0") or "0"
    return float(MAX_CACHE_S if len(significant) > _MAX_DIGITS else min(int(significant), MAX_CACHE_S))
