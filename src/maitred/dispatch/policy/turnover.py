"""When places come free: from how much each running answer still has to go.

A mean rate of completions would be wrong by as much as a whole answer: answers that began together end together. Every
running answer takes one token of each step, so places come free in the order of what is left of them; those who are
ahead in the line take them in turn and hold them for as long as an answer of theirs is.
"""

from collections.abc import Sequence
from heapq import heappop, heapreplace

_FOLLOWED = 128
"""So many places are followed one by one; beyond that, they come free evenly."""


def steps_until_place(left: Sequence[float], free: int, ahead: int, ahead_steps: float, own: int) -> float:
    """Steps until a request has got all of its places.

    Args:
        left: Steps that each running answer still takes, the fewest first.
        free: Places that it and those ahead may take now; below zero, so many more must come free first.
        ahead: Places that those ahead take before it.
        ahead_steps: Steps for which each of these is taken.
        own: Places that it needs.
    """
    places = [0.0] * free + list(left) if free > 0 else list(left)
    needed = ahead + own - min(free, 0)
    if not places:
        return 0.0
    if needed > max(_FOLLOWED, 2 * len(places)):
        # Each place comes free once a round of so many steps; on average half a round earlier than the round's end.
        return sum(places) / len(places) + ahead_steps * (needed / len(places) - 0.5)
    steps = 0.0
    followed = min(needed, _FOLLOWED)
    for number in range(followed):
        if number < needed - own:
            steps = places[0]
            heapreplace(places, steps + ahead_steps)
        elif places:
            steps = heappop(places)
    return steps * needed / followed if followed else 0.0
