"""Request headers of all inference routes: priority, deadlines, session, caches and routing constraints.

Routing constraints limit where a request may go and what it may cost; they can only reduce the choice. They are headers
because clients can add headers without special support (`extra_headers`, `default_headers`), and proxies can add them
for clients. If the body sets the same value, the header wins: the party that sets a header is closer to the gateway.
Only what both say about caches adds up.
"""

import math
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.flow import HIGHEST_PRIORITY, LOWEST_PRIORITY, PriorityClass
from maitred.core.inference import CacheControl, InferenceRequest
from maitred.wire.cache_control import CACHE_CONTROL, add_directives
from maitred.wire.openai.faults import format_value


class Headers:
    """Headers of one request; a call returns the value of a header by its name.

    Args:
        pairs: Pairs of name and value in their order, with names in lower case. If a name occurs several times, the
            first value counts, except for `all_of`.
    """

    __slots__ = ("_pairs", "_values")

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._pairs = pairs
        self._values = dict(reversed(pairs))

    def __call__(self, name: bytes) -> str | None:
        """Returns the first value of a header (name in lower case); None: it was not sent."""
        value = self._values.get(name)
        return None if value is None else value.decode("latin-1")

    def all_of(self, name: bytes) -> str:
        """Returns all values of a header that is a list, with commas between them (RFC 9110, section 5.3)."""
        return b", ".join(value for other, value in self._pairs if other == name).decode("latin-1")

    def followed_by(self, pairs: Sequence[tuple[bytes, bytes]]) -> "Headers":
        """Returns these headers with others behind them, which count where these do not have the name."""
        return Headers([*self._pairs, *pairs])

    def have_any(self, names: frozenset[bytes]) -> bool:
        """Returns whether any of these headers was sent; this saves look-ups, since most requests have none."""
        return not names.isdisjoint(self._values)


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def wish_in(header: Headers, name: str) -> bool | None:
    """Returns the value of a yes-or-no header; None: it is missing.

    Raises:
        InvalidRequest: The value is neither yes nor no.
    """
    return None if header(name.encode()) is None else flag_in(header, name)


def flag_in(header: Headers, name: str) -> bool:
    """Returns whether the header says yes; a missing header means no.

    Raises:
        InvalidRequest: The value is neither yes nor no.
    """
    value = header(name.encode())
    if value is None:
        return False
    flag = _FLAGS.get(value.strip().lower())
    if flag is None:
        raise InvalidRequest(f"{name} must be true or false; got {format_value(value)}.", param=name)
    return flag


LOCAL_ONLY = "x-maitred-local-only"
REGION = "x-maitred-region"
MOST_USD = "x-maitred-max-cost-usd"


class RoutingConstraints(TypedDict):
    """The fields of an `InferenceRequest` that hold the routing constraints."""

    local_only: bool
    regions: frozenset[str] | None
    max_usd: float | None


def routing_constraints_in(header: Headers) -> RoutingConstraints:
    """Returns the routing constraints that the headers set.

    Raises:
        InvalidRequest: The value of a header is invalid; `param` names the header.
    """
    return {
        "local_only": flag_in(header, LOCAL_ONLY),
        "regions": _regions_in(header(REGION.encode())),
        "max_usd": _dollars_in(header(MOST_USD.encode())),
    }


def _regions_in(value: str | None) -> frozenset[str] | None:
    if value is None:
        return None
    regions = frozenset(region.strip() for region in value.split(",")) - {""}
    if not regions:
        raise InvalidRequest(f"{REGION} must name a region, or several with commas.", param=REGION)
    return regions


def _dollars_in(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        usd = float(value)
    except ValueError:
        usd = math.nan
    if not 0 <= usd < math.inf:
        raise InvalidRequest(
            f"{MOST_USD} must be a number of dollars, 0 or more; got {format_value(value)}.", param=MOST_USD
        )
    return usd


PRIORITY = "x-maitred-priority"
TTFT = "x-maitred-ttft-ms"
ITL = "x-maitred-itl-ms"
DEADLINE = "x-maitred-deadline-ms"
PARTIAL = "x-maitred-partial"
SESSION = b"x-session-id"
NO_DEGRADATION = "x-maitred-no-degradation"
ESCALATE = "x-maitred-escalate"
RETRIES = "x-maitred-retries"
RETRY_COUNT = b"x-stainless-retry-count"
"""Header with the number of retries, which the official clients of OpenAI and Anthropic send with every request; it
begins at 0."""

MOST_RETRIES = 10
_LONGEST_MS = 7 * 24 * 3600 * 1000
_PRIORITY = PRIORITY.encode()
_CLASSES = {str(name): name for name in PriorityClass}
_NAMES = (PRIORITY, TTFT, ITL, DEADLINE, PARTIAL, NO_DEGRADATION, ESCALATE, RETRIES, LOCAL_ONLY, REGION, MOST_USD)
_CACHE_CONTROL = CACHE_CONTROL.encode()
_ALL = frozenset({SESSION, _CACHE_CONTROL, *(name.encode() for name in _NAMES)})


def apply_request_headers(request: InferenceRequest, header: Headers, *, retries: int = 0) -> InferenceRequest:
    """Returns the request with the priority, session, cache control and bounds that its headers set.

    Args:
        request: The request, with the priority and the cache control that the body sets.
        header: The request's headers.
        retries: How often the same request was sent before.

    Raises:
        InvalidRequest: The value of a header is invalid; `param` names the header.
    """
    if not header.have_any(_ALL):
        return request if not retries else msgspec.structs.replace(request, retries=retries)
    priority = _priority_in(header)
    return msgspec.structs.replace(
        request,
        priority=request.priority if priority is None else priority,
        ttft_in_s=_seconds_in(header, TTFT),
        itl_objective_s=_seconds_in(header, ITL),
        deadline_in_s=_seconds_in(header, DEADLINE),
        partial=flag_in(header, PARTIAL),
        degradable=not flag_in(header, NO_DEGRADATION),
        escalate=wish_in(header, ESCALATE),
        most_retries=_most_retries_in(header),
        session=header(SESSION) or request.session,
        cache=_cache_control_in(header, request.cache),
        retries=retries,
        **routing_constraints_in(header),
    )


def retries_in(header: Headers) -> int:
    """Returns the number of retries that the client reports; 0 if the header is missing or unreadable.

    The header belongs to the clients' own convention, so an invalid value is not refused.
    """
    value = header(RETRY_COUNT)
    if value is None or value == "0":
        return 0
    value = value.strip()
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 6 else 0


def _most_retries_in(header: Headers) -> int | None:
    value = header(RETRIES.encode())
    if value is None:
        return None
    digits = value.strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= 2 and int(digits) <= MOST_RETRIES:
        return int(digits)
    raise InvalidRequest(
        f"{RETRIES} must be a whole number from 0 to {MOST_RETRIES}; got {format_value(value)}.", param=RETRIES
    )


def _cache_control_in(header: Headers, control: CacheControl) -> CacheControl:
    return control if header(_CACHE_CONTROL) is None else add_directives(control, header.all_of(_CACHE_CONTROL))


def _priority_in(header: Headers) -> int | None:
    value = header(_PRIORITY)
    if value is None:
        return None
    word = value.strip().lower()
    if word in _CLASSES:
        return _CLASSES[word].priority
    if word.isascii() and word.isdigit() and len(word) <= 2 and LOWEST_PRIORITY <= int(word) <= HIGHEST_PRIORITY:
        return int(word)
    raise InvalidRequest(
        f"{PRIORITY} must be a number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY} (the most urgent), or one of "
        f"{', '.join(_CLASSES)}; got {format_value(value)}.",
        param=PRIORITY,
    )


def _seconds_in(header: Headers, name: str) -> float | None:
    value = header(name.encode())
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= _LONGEST_MS:
        raise InvalidRequest(
            f"{name} must be a number of milliseconds, more than 0 and at most {_LONGEST_MS}; got "
            f"{format_value(value)}.",
            param=name,
        )
    return milliseconds / 1000
