"""Sum of the demand of the gateways that share a pool, each request counted once.

A gateway tells all that has arrived since its start, and for how long it has counted. A reader takes the difference to
what it heard before. So it does not matter how often either of them comes to it: what is told late counts late, what is
told twice counts once, and what nobody has read is in what is told next.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from maitred.scaling.demand import ArrivalWindow, Demand

_GONE_S = 5.0
"""A gateway that has told nothing new for so long is gone: its queue and its requests do not count any more."""
_MOST_OWED_S = 15.0
"""Of a gateway that was silent, the arrivals of so many seconds count: a forecast is about the present."""
_CATCH_UP = 2.0
"""How much faster than they came late arrivals are counted: all at once they would look like a crowd."""
_NONE = ArrivalWindow(start_s=0.0, length_s=0.0)


class DemandSum:
    """Sum of the demand of several gateways, as one of them sees it. All times are on its monotonic clock."""

    def __init__(self) -> None:
        self._total = _NONE
        self._others: dict[str, _Gateway] = {}
        self._has_heard = False

    def tell(self, own: Demand) -> Demand:
        """Returns what this gateway tells the others: its demand, with all arrivals since its start."""
        self._total = _add(self._total, own.window)
        return replace(own, window=self._total)

    def hear(self, told: Iterable[tuple[str, int, Demand]], now_s: float) -> None:
        """Takes what all other gateways have told last: their names, numbers that grow, and demands.

        Who is not among them any more is forgotten. Who was there before this gateway began to listen counts as soon as
        it tells something new: it may be gone, and what it has told may have arrived long ago.
        """
        others = dict[str, _Gateway]()
        for name, sequence, demand in told:
            gateway = self._others.get(name)
            if gateway is None:
                gateway = _Gateway(sequence=sequence, demand=demand, heard_s=now_s, is_there=self._has_heard)
                gateway.owed = _last(demand.window, _MOST_OWED_S) if self._has_heard else _NONE
            elif sequence > gateway.sequence:
                came = _add(demand.window, gateway.demand.window, times=-1.0)
                gateway.owed = _last(_add(gateway.owed, came), _MOST_OWED_S)
                gateway.sequence, gateway.demand = sequence, demand
                gateway.heard_s, gateway.is_there = now_s, True
            others[name] = gateway
        self._others, self._has_heard = others, True

    def add(self, own: Demand, now_s: float) -> Demand:
        """Returns the demand of all gateways, with what has arrived at the others and has not been counted yet."""
        window, whole = own.window, own
        for gateway in self._others.values():
            owed = gateway.owed
            share = min(1.0, _CATCH_UP * own.window.length_s / owed.length_s) if owed.length_s > 0 else 0.0
            window = _add(window, owed, times=share)
            gateway.owed = _NONE if share == 1.0 else _add(owed, owed, times=-share)
            if gateway.is_there and now_s - gateway.heard_s < _GONE_S:
                told = gateway.demand
                whole = replace(
                    whole,
                    waiting=whole.waiting + told.waiting,
                    waiting_prompt_tokens=whole.waiting_prompt_tokens + told.waiting_prompt_tokens,
                    waiting_output_tokens=whole.waiting_output_tokens + told.waiting_output_tokens,
                    running=whole.running + told.running,
                    confined_requests=whole.confined_requests + told.confined_requests,
                    oldest_wait_s=max(whole.oldest_wait_s, told.oldest_wait_s),
                )
        return replace(whole, window=replace(window, length_s=own.window.length_s))

    def silent(self, for_s: float, now_s: float) -> dict[str, int]:
        """Returns the gateways from which nothing new was heard for so long, with the number of what they told last."""
        return {name: one.sequence for name, one in self._others.items() if now_s - one.heard_s >= for_s}


class _Gateway(Struct, kw_only=True):
    """Another gateway: what it told last, and its arrivals that have not been counted yet."""

    sequence: int
    demand: Demand
    heard_s: float
    """When that was heard first."""
    is_there: bool
    """Whether it was seen to tell something."""
    owed: ArrivalWindow = _NONE
    """These arrivals, and the seconds in which they came."""


def _add(window: ArrivalWindow, other: ArrivalWindow, *, times: float = 1.0) -> ArrivalWindow:
    """Returns a window with so many times the arrivals and the length of another one; floats never go below 0."""
    return ArrivalWindow(
        start_s=window.start_s,
        length_s=max(0.0, window.length_s + times * other.length_s),
        requests=max(0.0, window.requests + times * other.requests),
        prompt_tokens=max(0.0, window.prompt_tokens + times * other.prompt_tokens),
        output_tokens=max(0.0, window.output_tokens + times * other.output_tokens),
        cached_tokens=max(0.0, window.cached_tokens + times * other.cached_tokens),
    )


def _last(window: ArrivalWindow, most_s: float) -> ArrivalWindow:
    """Returns the last seconds of a window, at its mean rate."""
    return window if window.length_s <= most_s else _add(_NONE, window, times=most_s / window.length_s)
