"""When it will be a tenant's turn in a fair line: played through, as far as it can be known.

What is ahead of a request now says too little where tenants share: while it waits, the counters go on rising with the
answers that run, places come free in the order in which these end, and tenants that have nothing waiting now will send
something. All of that is known or has a rate, so a few dozen places are given out in thought, to whoever has the least
counter at that moment, until it is the request's turn. Classes and the levels below a tenant are left out: where
several classes wait, the line's own estimate is used instead.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from maitred.core.flow import Flow

MOST_TENANTS = 16
"""In larger crowds one tenant's counter matters less, and playing it through costs more."""
MOST_AHEAD = 48
"""Beyond this a request is so far away that what is ahead of it averages out."""
_FOLLOWED = 64
"""Places that are given out at most; what takes longer, takes longer in proportion."""
_MEMORY_S = 10.0


@dataclass(slots=True)
class Runner:
    """One tenant in the race."""

    counter: float
    """Service per weight that it leads by."""
    weight: float
    waiting: int
    prompt_service: float
    """What a request of it is charged when it is released."""
    steps: float
    """For which it keeps its place then."""
    joins_per_step: float
    """Requests that it will send."""


def steps_until_turn(
    runners: Sequence[Runner], mine: int, before: int, running: Sequence[tuple[float, int]], free: int, output: float
) -> float:
    """Steps until a request of one tenant is released.

    Args:
        runners: All tenants that wait or may send something.
        mine: Whose request it is.
        before: Requests of its own tenant that go before it.
        running: For each place that is taken, the steps until it is free and whose it is (-1: somebody else's).
        free: Places that are free; below zero, so many that come free are for others.
        output: Service of one token of an answer.
    """
    places = [(0.0, -1)] * max(0, free) + list(running)
    heapify(places)
    counters = [runner.counter for runner in runners]
    # Nobody knows when the next one comes; on average half the time between two has passed.
    waiting = [runner.waiting + (0.5 if runner.joins_per_step else 0.0) for runner in runners]
    waiting[mine] = before + 1.0
    rises = [0.0] * len(runners)
    for _, whose in running:
        if whose >= 0:
            rises[whose] += output / runners[whose].weight
    sending = [k for k, runner in enumerate(runners) if runner.joins_per_step and k != mine]
    skipped = max(0, -free)
    now = 0.0
    for _ in range(_FOLLOWED):
        if not places:
            break
        then, ended = heappop(places)
        passed, now = then - now, then
        if passed > 0:
            counters = [counter + passed * rise for counter, rise in zip(counters, rises, strict=True)]
            for k in sending:
                before_it = waiting[k]
                waiting[k] = before_it + passed * runners[k].joins_per_step
                if before_it < 1.0 <= waiting[k]:
                    counters[k] = max(counters[k], _level(counters, waiting, k))
        if ended >= 0:
            rises[ended] -= output / runners[ended].weight
        if skipped:
            skipped -= 1
            continue
        first, least = mine, counters[mine]
        for k, count in enumerate(waiting):
            if count >= 1.0 and counters[k] < least:
                first, least = k, counters[k]
        if first == mine:
            if not before:
                return now
            before -= 1
        runner = runners[first]
        waiting[first] -= 1.0
        counters[first] += runner.prompt_service / runner.weight
        rises[first] += output / runner.weight
        heappush(places, (now + runner.steps, first))
    # It is further away than was looked.
    return now * (1.0 + before / 8)


def _level(counters: Sequence[float], waiting: Sequence[float], newcomer: int) -> float:
    """Where one is lifted to that begins to wait."""
    return min(counter for k, counter in enumerate(counters) if waiting[k] >= 1.0 and k != newcomer)


class Joins:
    """How often each tenant sends something that may wait; a mean that forgets."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float, Flow]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[tuple[str, Flow]]:
        """Those that sent something last, with what it was; the last one last."""
        return ((tenant, flow) for tenant, (_, _, flow) in self._of.items())

    def saw(self, flow: Flow, now_s: float) -> None:
        """One more."""
        tenant = flow.path[0].id
        count = self.per_s(tenant, now_s) * _MEMORY_S + 1.0
        self._of.pop(tenant, None)
        self._of[tenant] = (count, now_s, flow)
        if len(self._of) > 2 * MOST_TENANTS:
            del self._of[next(iter(self._of))]

    def per_s(self, tenant: str, now_s: float) -> float:
        """The rate now."""
        known = self._of.get(tenant)
        if known is None:
            return 0.0
        count, seen_s, _ = known
        return count * math.exp(-(now_s - seen_s) / _MEMORY_S) / _MEMORY_S
