"""When it will be a tenant's turn in a fair line: played through, as far as it can be known.

What is ahead of a request now says too little where tenants share: while it waits, the counters go on rising with the
answers that run, places come free in the order in which these end, and tenants that have nothing waiting now will send
something. All of that is known or has a rate, so a few dozen places are given out in thought, to whoever has the least
counter at that moment, until it is the request's turn. Classes and the levels below a tenant are left out: where
several classes wait, the line's own estimate is used instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

MOST_TENANTS = 16
"""In larger crowds one tenant's counter matters less, and playing it through costs more."""
MOST_AHEAD = 48
"""Beyond this a request is so far away that what is ahead of it averages out."""
_FOLLOWED = 64
"""Places that are given out at most; what takes longer, takes longer in proportion."""


@dataclass(slots=True)
class SimulatedTenant:
    """One tenant in the race."""

    counter: float
    """Service per weight that it leads by."""
    weight: float
    waiting: int
    prompt_service: float
    """What a typical request of it is charged when it is released."""
    steps: float
    """For which it keeps its place then."""
    joins_per_step: float
    """Requests that it will send."""
    held: int = 0
    """Places that it has."""
    prompts: Sequence[float] = ()
    """What those that wait are charged, the next one first; further ones, as is typical."""

    def prompt(self, number: int) -> float:
        """Returns the service that one of its requests is charged at dispatch, from the next one on."""
        return self.prompts[number] if number < len(self.prompts) else self.prompt_service


class PredictedTurn(NamedTuple):
    """When it is the turn of a request."""

    steps: float
    releases: float
    """Others that are released before then, whose prompts make some of these steps longer."""


def simulate_dispatch(
    runners: Sequence[SimulatedTenant],
    mine: int,
    before: int,
    running: Sequence[tuple[float, int]],
    free: int,
    output: float,
    overcommit: int = 0,
) -> PredictedTurn:
    """Simulates the queue until a request of one tenant is dispatched.

    Args:
        runners: All tenants that wait or may send something.
        mine: Whose request it is.
        before: Requests of its own tenant that go before it.
        running: For each place that is taken, the steps until it is free and whose it is (-1: somebody else's).
        free: Places that are free; below zero, so many that come free are for others.
        output: Service of one token of an answer.
        overcommit: So many more may come beyond the places (see `maitred.engine.scheduler.overcommit`).
    """
    return _Simulation(runners, mine, before, running, free, output, overcommit).run()


class _Simulation:
    """One play of a line; see `simulate_dispatch`."""

    def __init__(
        self,
        runners: Sequence[SimulatedTenant],
        mine: int,
        before: int,
        running: Sequence[tuple[float, int]],
        free: int,
        output: float,
        overcommit: int,
    ) -> None:
        self._runners = runners
        self._weights = [runner.weight for runner in runners]
        self._services = [runner.prompt_service + output * runner.steps for runner in runners]
        """Of a request."""
        self._mine = mine
        self._before = before
        self._free = free
        self._least_free = min(0, free) - overcommit
        self._output = output
        self._now = 0.0
        self._released = self._released_before = 0
        self._taken = [0] * len(runners)
        self._ends = list(running)
        heapify(self._ends)
        self._counters = [runner.counter for runner in runners]
        # Nobody knows when the next one comes; on average half the time between two has passed.
        self._waiting = [runner.waiting + (0.5 if runner.joins_per_step else 0.0) for runner in runners]
        self._waiting[mine] = before + 1.0
        self._sending = [k for k, runner in enumerate(runners) if runner.joins_per_step and k != mine]
        self._held = [runner.held for runner in runners]
        self._more = [(runner.held + 1) / runner.weight for runner in runners]
        """Places per weight that each would have with one more..."""
        self._fewer = [(runner.held - 1) / runner.weight for runner in runners]
        """...and with one less."""
        self._rises = [0.0] * len(runners)
        for _, index in running:
            if index >= 0:
                self._rises[index] += output / runners[index].weight

    def run(self) -> PredictedTurn:
        """Runs the simulation to its end."""
        first = self._next()
        if self._free <= 0 and first != self._mine:
            first = None  # whoever waits already has been looked at
        for _ in range(_FOLLOWED):
            while first is not None:
                if first == self._mine:
                    if not self._before:
                        return PredictedTurn(self._now, self._released_before)
                    self._before -= 1
                self._release(first)
                first = self._next()
            if not self._ends:
                break
            self._pass(*heappop(self._ends))
            first = self._next()
        # It is further away than was looked.
        farther = 1.0 + self._before / 8
        return PredictedTurn(self._now * farther, self._released_before * farther)

    def _pass(self, then: float, ended: int) -> None:
        """Time passes until an answer ends."""
        runners, waiting = self._runners, self._waiting
        passed, self._now = then - self._now, then
        if passed > 0:
            self._released_before = self._released
            self._counters = [
                counter + passed * rise for counter, rise in zip(self._counters, self._rises, strict=True)
            ]
            for k in self._sending:
                before_it = waiting[k]
                waiting[k] = before_it + passed * runners[k].joins_per_step
                if before_it < 1.0 <= waiting[k]:
                    self._counters[k] = max(self._counters[k], self._level(k))
        self._free += 1
        if ended >= 0:
            self._hold(ended, -1)

    def _next(self) -> int | None:
        """Whose request is released now, on a place or as a guest."""
        if self._free > 0:
            return self._head()
        return None if self._free <= self._least_free else self._overcommit_candidate(self._head())

    def _overcommit_candidate(self, head: int) -> int | None:
        """Returns the tenant that is dispatched beyond the slots: the head, or whoever holds least.

        See `maitred.fairness.vtc.yields_to`: who has most per weight gives way first, and nobody to itself.
        """
        more, counters = self._more, self._counters
        given = max(self._fewer)
        if more[head] <= given:
            return head
        level = counters[head]
        lightest, least = None, given
        for k, count in enumerate(self._waiting):
            if count >= 1.0 and more[k] <= least and (counters[k] - level) * self._weights[k] <= self._services[k]:
                lightest, least = k, more[k]
        return lightest

    def _release(self, index: int) -> None:
        runner = self._runners[index]
        self._free -= 1
        self._released += 1
        self._waiting[index] -= 1.0
        self._hold(index, 1)
        self._counters[index] += runner.prompt(self._taken[index]) / runner.weight
        self._taken[index] += 1
        heappush(self._ends, (self._now + runner.steps, index))

    def _hold(self, index: int, places: int) -> None:
        """Adds slots to a tenant's holdings; a negative number takes them off."""
        weight = self._weights[index]
        held = self._held[index] = self._held[index] + places
        self._more[index], self._fewer[index] = (held + 1) / weight, (held - 1) / weight
        self._rises[index] += places * self._output / weight

    def _head(self) -> int:
        """Returns the waiting tenant that was served least."""
        counters = self._counters
        first, least = self._mine, counters[self._mine]
        for k, count in enumerate(self._waiting):
            if count >= 1.0 and counters[k] < least:
                first, least = k, counters[k]
        return first

    def _level(self, newcomer: int) -> float:
        """Where one is lifted to that begins to wait."""
        return min(counter for k, counter in enumerate(self._counters) if self._waiting[k] >= 1.0 and k != newcomer)
