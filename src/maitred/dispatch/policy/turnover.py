"""Steps until slots become free, from the remaining steps of running requests.

A mean completion rate could be wrong by a whole request, because requests that start together end together. Every
running request gets one token per step, so slots become free in order of remaining steps. Requests ahead in the queue
take them in turn and hold them for their own length.
"""

from collections.abc import Sequence
from heapq import heappop, heapreplace

_MAX_SIMULATED_SLOTS = 128
"""Maximum number of slots that are simulated one by one; beyond it the result is scaled."""


def steps_until_place(left: Sequence[float], free: int, ahead: int, ahead_steps: float, own: int) -> float:
    """Returns the steps until a request has all its slots.

    Args:
        left: Remaining steps of each used slot, ascending.
        free: Free slots; if negative, that many more must become free first.
        ahead: Slots that requests ahead take first.
        ahead_steps: Steps for which each of these slots is held.
        own: Slots that the request needs.
    """
    slot_free_steps = [0.0] * free + list(left) if free > 0 else list(left)
    needed = ahead + own - min(free, 0)
    if not slot_free_steps:
        return 0.0
    if needed > max(_MAX_SIMULATED_SLOTS, 2 * len(slot_free_steps)):
        # Each slot becomes free once every `ahead_steps` steps; on average half such a round before its end.
        return sum(slot_free_steps) / len(slot_free_steps) + ahead_steps * (needed / len(slot_free_steps) - 0.5)
    steps = 0.0
    simulated = min(needed, _MAX_SIMULATED_SLOTS)
    for number in range(simulated):
        if number < needed - own:
            steps = slot_free_steps[0]
            heapreplace(slot_free_steps, steps + ahead_steps)
        elif slot_free_steps:
            steps = heappop(slot_free_steps)
    return steps * needed / simulated if simulated else 0.0
