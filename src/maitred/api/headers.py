"""Headers of one request, and what all inference takes from them: priority, deadlines, session, routing constraints.

Routing constraints say where a request may go and what it may cost; they only ever narrow. These are headers, because
clients can add them without knowing of us (`extra_headers`, `default_headers`), and proxies can on behalf of clients.
Where a body says the same, the header wins: whoever sets it is nearer to us.
"""

import math
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.flow import HIGHEST_PRIORITY, LOWEST_PRIORITY, PriorityClass
from maitred.core.inference import InferenceRequest
from maitred.wire.openai.faults import format_value


class Headers:
    """Looks up a header by its name, which is called like the function that it is to others.

    Args:
        pairs: As they came, with names in lower case. Of several with one name, the first counts.
    """

    __slots__ = ("_values",)

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._values = dict(reversed(pairs))

    def __call__(self, name: bytes) -> str | None:
        """The first value of a header (name in lower case); None where it was not sent."""
        value = self._values.get(name)
        return None if value is None else value.decode("latin-1")

    def have_any(self, names: frozenset[bytes]) -> bool:
        """Whether one of these was sent: most requests have none of ours, and need not be asked for each."""
        return not names.isdisjoint(self._values)


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def wish_in(header: Headers, name: str) -> bool | None:
    """Returns what a yes-or-no header says; None where it is missing.

    Raises:
        InvalidRequest: It says neither yes nor no.
    """
    return None if header(name.encode()) is None else flag_in(header, name)


def flag_in(header: Headers, name: str) -> bool:
    """Whether the header says yes; one that is not there says no.

    Raises:
        InvalidRequest: It says neither.
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
    """The fields of an `Ask` that say so."""

    local_only: bool
    regions: frozenset[str] | None
    max_usd: float | None


def routing_constraints_in(header: Headers) -> RoutingConstraints:
    """Returns the routing constraints that the headers set.

    Raises:
        InvalidRequest: A header makes no sense; `param` names it.
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
RETRY_COUNT = b"x-stainless-retry-count"
"""What OpenAI's and Anthropic's own clients send with every request: 0, and one more with each retry."""

_LONGEST_MS = 7 * 24 * 3600 * 1000
_PRIORITY = PRIORITY.encode()
_CLASSES = {str(name): name for name in PriorityClass}
_NAMES = (PRIORITY, TTFT, ITL, DEADLINE, PARTIAL, NO_DEGRADATION, ESCALATE, LOCAL_ONLY, REGION, MOST_USD)
_ALL = frozenset({SESSION, *(name.encode() for name in _NAMES)})


def apply_priority_headers(request: InferenceRequest, header: Headers, *, retries: int = 0) -> InferenceRequest:
    """Returns the request with what its headers say of urgency, session and bounds.

    Args:
        request: With the priority that the body asks for, if it does.
        header: The request's headers.
        retries: How often the same request came before.

    Raises:
        InvalidRequest: A header makes no sense; `param` names it.
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
        session=header(SESSION) or request.session,
        retries=retries,
        **routing_constraints_in(header),
    )


def retries_in(header: Headers) -> int:
    """How often the client says that it has sent this before; 0 where it says nothing that can be read.

    The header is not ours, and whoever sends nonsense in it has not asked us for anything.
    """
    value = header(RETRY_COUNT)
    if value is None or value == "0":
        return 0
    value = value.strip()
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 6 else 0


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
