"""Arrivals of sessions: a process at rate 1 whose time is transformed so that it follows any rate.

If N has rate 1, then N(Λ(t)) has the rate λ(t) whose integral is Λ. So each arrival of N is moved to the time at which
Λ reaches it: the inversion method (Çinlar, *Introduction to Stochastic Processes*, 1975, ch. 4.7; Cox and Lewis, *The
Statistical Analysis of Series of Events*, 1966, ch. 2). 4.7; Cox and Lewis, *The Statistical Analysis of Series of
Events*, 1966, ch. 2). The method is exact for a Poisson process, and also works for gaps of any distribution (Gerhardt
and Nelson, *Transforming Renewal Processes for Simulation of Nonstationary Arrival Processes*, 2009), so ramps, spikes
and bursts need no code of their own. Here Λ is piecewise quadratic: it and its inverse are exact, no drawn arrival is
rejected, and each costs about a microsecond.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from maitred.core.errors import InvalidRequest
from maitred.load.spec import ArrivalsSpec
from maitred.load.workload import terms

FORMS = (
    "`steady`, `ramp:from=0,to=2,over=60`, `spike:at=60,for=10,factor=5`, `bursts:every=30,for=5,factor=8`, "
    "`points:0=1,60=3,90=1`"
)


@dataclass(frozen=True)
class RateSegment:
    """Segment of a rate profile over which the factor changes linearly.

    Attributes:
        length_s: Length of the segment; above 0.
        begin: The factor at its beginning.
        end: The factor at its end.
    """

    length_s: float
    begin: float
    end: float

    @cached_property
    def area(self) -> float:
        """Integral of the factor over the segment, in seconds."""
        return self.length_s * (self.begin + self.end) / 2

    @cached_property
    def _slope_per_s(self) -> float:
        return (self.end - self.begin) / self.length_s

    def factor(self, at_s: float) -> float:
        """Returns the factor `at_s` after the beginning of the segment."""
        return self.begin + self._slope_per_s * at_s

    def integral(self, to_s: float) -> float:
        """Returns the integral from the beginning of the segment, in seconds."""
        return to_s * (self.begin + self._slope_per_s * to_s / 2)

    def inverse(self, area: float) -> float:
        """Returns when the integral reaches `area`, which is at most the whole.

        The root of the quadratic is computed in the form that does not subtract two numbers of nearly the same size.
        """
        root = self.begin + math.sqrt(max(0.0, self.begin**2 + 2 * self._slope_per_s * area))
        return min(2 * area / root, self.length_s) if root > 0 else 0.0


@dataclass(frozen=True)
class RateProfile:
    """Profile of a factor on the rate (or the users) over time: a lead, then a cycle that repeats.

    Attributes:
        lead: Segments that occur once, at the beginning; may be empty.
        cycle: Segments that repeat after the lead; a constant end is a cycle of one flat segment.
    """

    lead: tuple[RateSegment, ...]
    cycle: tuple[RateSegment, ...]

    @cached_property
    def _lead_s(self) -> float:
        return sum(piece.length_s for piece in self.lead)

    @cached_property
    def _lead_area(self) -> float:
        return sum(piece.area for piece in self.lead)

    @cached_property
    def _cycle_s(self) -> float:
        return sum(piece.length_s for piece in self.cycle)

    @cached_property
    def _cycle_area(self) -> float:
        return sum(piece.area for piece in self.cycle)

    def factor(self, at_s: float) -> float:
        """Returns the factor at a time since the start of the run; at a jump, the factor after it."""
        if at_s < self._lead_s:
            pieces = self.lead
        else:
            pieces, at_s = self.cycle, (at_s - self._lead_s) % self._cycle_s
        for piece in pieces:
            if at_s < piece.length_s:
                return piece.factor(at_s)
            at_s -= piece.length_s
        return pieces[-1].end

    def integral(self, to_s: float) -> float:
        """Returns the integral from 0 to `to_s`, in seconds: due sessions at one per second."""
        if to_s < self._lead_s:
            return _integral(self.lead, to_s)
        cycles, rest_s = divmod(to_s - self._lead_s, self._cycle_s)
        return self._lead_area + cycles * self._cycle_area + _integral(self.cycle, rest_s)

    def inverse(self, area: float) -> float:
        """Returns the first time at which the integral reaches `area`; infinity if it never does."""
        if area <= self._lead_area:
            return _inverse(self.lead, area)
        if self._cycle_area == 0:
            return math.inf
        cycles, rest = divmod(area - self._lead_area, self._cycle_area)
        return self._lead_s + cycles * self._cycle_s + _inverse(self.cycle, rest)


def _integral(pieces: Sequence[RateSegment], to_s: float) -> float:
    area = 0.0
    for piece in pieces:
        if to_s <= piece.length_s:
            return area + piece.integral(to_s)
        area += piece.area
        to_s -= piece.length_s
    return area


def _inverse(pieces: Sequence[RateSegment], area: float) -> float:
    at_s = 0.0
    for piece in pieces:
        if area <= piece.area:
            return at_s + piece.inverse(area)
        area -= piece.area
        at_s += piece.length_s
    return at_s


def _flat(length_s: float, factor: float) -> RateSegment:
    return RateSegment(length_s, factor, factor)


STEADY = RateProfile((), (_flat(1.0, 1.0),))


def parse_profile(text: str) -> RateProfile:
    """Parses a profile of rates.

    * ``steady``: always 1.
    * ``ramp:from=0,to=2,over=60``: a straight line, then its last value permanently.
    * ``spike:at=60,for=10,factor=5``: 1, but 5 from 60 s to 70 s.
    * ``bursts:every=30,for=5,factor=8``: 1, but 8 for 5 s from 30 s, 60 s, 90 s and so on.
    * ``points:0=1,60=3,90=1``: straight lines between points; the first and the last factor hold before and after.

    Raises:
        InvalidRequest: The text has none of these forms, or its factor is always 0.
    """
    try:
        profile = _parse(text)
    except ValueError as error:
        raise InvalidRequest(
            f"arrivals.profile: {text!r} is no profile: {error}. Write one of {FORMS}.", param="arrivals.profile"
        ) from None
    if not any(piece.area for piece in (*profile.lead, *profile.cycle)):
        raise InvalidRequest(
            f"arrivals.profile: {text!r} is 0 all the time. Let it rise above 0 somewhere.", param="arrivals.profile"
        )
    return profile


def _parse(text: str) -> RateProfile:
    kind, rest = terms.split_kind(text)
    match kind:
        case "steady" if not rest:
            return STEADY
        case "ramp":
            begin, end, over_s = terms.named_numbers(rest, "from", "to", "over")
            return RateProfile(_without_empty(RateSegment(over_s, begin, end)), (_flat(1.0, end),))
        case "spike":
            at_s, for_s, factor = terms.named_numbers(rest, "at", "for", "factor")
            return RateProfile(_without_empty(_flat(at_s, 1.0), _flat(for_s, factor)), STEADY.cycle)
        case "bursts":
            every_s, for_s, factor = terms.named_numbers(rest, "every", "for", "factor")
            if not for_s < every_s:
                raise ValueError(f"bursts of {for_s:g} s do not fit in every {every_s:g} s")
            return RateProfile(
                (_flat(every_s, 1.0),), _without_empty(_flat(for_s, factor), _flat(every_s - for_s, 1.0))
            )
        case "points":
            points = terms.rising_numbers(rest)
            lines = [
                RateSegment(end_s - begin_s, begin, end)
                for (begin_s, begin), (end_s, end) in itertools.pairwise(points)
            ]
            (first_s, first), (_, last) = points[0], points[-1]
            return RateProfile(_without_empty(_flat(first_s, first), *lines), (_flat(1.0, last),))
        case _:
            raise ValueError(f"there is no kind {kind!r}" if kind != "steady" else "`steady` has no values")


def _without_empty(*pieces: RateSegment) -> tuple[RateSegment, ...]:
    return tuple(piece for piece in pieces if piece.length_s > 0)


def constant_times() -> Iterator[float]:
    """Yields regular arrivals at rate 1, in the middle of every unit."""
    return itertools.count(0.5)


def renewal_times(gap: Callable[[], float]) -> Iterator[float]:
    """Yields arrivals whose gaps are independent draws; the mean of the gaps should be 1."""
    at = 0.0
    while True:
        at += gap()
        yield at


def unit_times(arrivals: ArrivalsSpec, rng: random.Random) -> Iterator[float]:
    """Yields arrivals at rate 1 by the process that the spec names."""
    match arrivals.process:
        case "constant":
            return constant_times()
        case "poisson":
            return renewal_times(lambda: rng.expovariate(1.0))
        case "gamma":
            shape = arrivals.cv**-2
            return renewal_times(lambda: rng.gammavariate(shape, 1 / shape))


def arrival_times(arrivals: ArrivalsSpec, rng: random.Random) -> Iterator[float]:
    """Yields ascending begin times of sessions in seconds; endless unless the rate ends at 0.

    Args:
        arrivals: Settings of the arrivals, with `rate_per_s`.
        rng: Random generator of the arrivals alone.

    Raises:
        InvalidRequest: The profile cannot be parsed.
    """
    profile = parse_profile(arrivals.profile)
    return warp(unit_times(arrivals, rng), profile, arrivals.rate_per_s or 1.0)


def warp(times: Iterator[float], profile: RateProfile, rate_per_s: float) -> Iterator[float]:
    """Moves arrivals at rate 1 so that they follow `rate_per_s` times the profile."""
    last_s = 0.0
    for time in times:
        # Rounding at the border of two segments can move a time back by a part in 10^16.
        last_s = max(last_s, profile.inverse(time / rate_per_s))
        if last_s == math.inf:
            return
        yield last_s
