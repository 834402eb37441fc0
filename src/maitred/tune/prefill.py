"""How many tokens one step may have: as many prompt tokens beside a full batch as the objective leaves time for.

The time of a step grows with its tokens along a line once the processor is busy. The line is drawn through prompts of
different lengths, each computed alone in one step, with the slope of Theil and Sen (the median over all pairs), which a
few disturbed measurements do not move.
"""

import statistics
from collections.abc import Sequence
from itertools import combinations

import msgspec

ENOUGH = 0.9
"""Share of the best prompt tokens per second that a step should reach; beyond it longer steps only cost latency."""
GRAIN = 16
"""Limits are multiples of it."""


class Prefill(msgspec.Struct, frozen=True):
    """A prompt that was computed alone, in one step."""

    tokens: int
    seconds: float
    """Until its first token; the median of several."""


def token_s(prefills: Sequence[Prefill]) -> float | None:
    """Returns what one more prompt token adds to a step; None: unknown, from fewer than two lengths or only noise."""
    slopes = [
        (longer.seconds - shorter.seconds) / (longer.tokens - shorter.tokens)
        for shorter, longer in combinations(sorted(prefills, key=lambda prefill: prefill.tokens), 2)
        if longer.tokens > shorter.tokens
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    return slope if slope > 0 else None


def step_tokens(prefills: Sequence[Prefill], *, sequences: int, decode_s: float, objective_s: float) -> int | None:
    """The limit on a step's tokens; None: too little is known.

    Args:
        prefills: What was measured.
        sequences: Of a full batch. The step holds one token of each, and some of a prompt at least.
        decode_s: What a step of these takes without any prompt.
        objective_s: What it may take.
    """
    slope = token_s(prefills)
    if slope is None:
        return None
    in_time = (objective_s - decode_s) / slope
    best = max(prefill.tokens / prefill.seconds for prefill in prefills)
    enough = min(prefill.tokens for prefill in prefills if prefill.tokens / prefill.seconds >= best * ENOUGH)
    tokens = max(GRAIN, min(int(in_time), enough))
    return (sequences + tokens) // GRAIN * GRAIN
