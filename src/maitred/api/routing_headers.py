"""Where a request may go, and what it may cost: headers that all inference takes, and that only ever narrow."""

import math
from typing import TypedDict

from maitred.api.headers import Headers, flag_in
from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import format_value

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
