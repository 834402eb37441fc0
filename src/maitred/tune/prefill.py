"""Token limit of a step: the prompt tokens that fit beside a full batch within the objective.

The time of a step grows linearly with its tokens once the processor is busy. The line is fitted to prompts of different
lengths, each computed alone in one step. Its slope is that of Theil and Sen (the median over all pairs), which a few
disturbed measurements do not change.
"""

import statistics
from collections.abc import Sequence
from itertools import combinations

import msgspec

ENOUGH = 0.9
"""Share of the best prompt tokens per second that a step should reach; longer steps only add latency."""
GRAIN = 16
"""Granularity: limits are multiples of it."""


class Prefill(msgspec.Struct, frozen=True):
    """Prefill: a prompt that was computed alone, in one step."""

    tokens: int
    seconds: float
    """Time to its first token, in seconds; the median of several."""


def token_s(prefills: Sequence[Prefill]) -> float | None:
    """Returns the time per prompt token in a step; None: fewer than two lengths, or only noise."""
    slopes = [
        (longer.seconds - shorter.seconds) / (longer.tokens - shorter.tokens)
        for shorter, longer in combinations(sorted(prefills, key=lambda prefill: prefill.tokens), 2)
        if longer.tokens > shorter.tokens
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    return slope if slope > 0 else None


def step_tokens(prefills: Sequence[Prefill], *, sequences: int, decode_s: float, objective_s: float) -> int | None:
    """Returns the limit on a step's tokens; None: there are too few measurements.

    Args:
        prefills: Measured prefills.
        sequences: Sequences of a full batch. A step holds one token of each, and at least a part of a prompt.
        decode_s: Time of a step with these sequences and without a prompt.
        objective_s: Longest allowed time of a step.
    """
    slope = token_s(prefills)
    if slope is None:
        return None
    in_time = (objective_s - decode_s) / slope
    best = max(prefill.tokens / prefill.seconds for prefill in prefills)
    enough = min(prefill.tokens for prefill in prefills if prefill.tokens / prefill.seconds >= best * ENOUGH)
    tokens = max(GRAIN, min(int(in_time), enough))
    return (sequences + tokens) // GRAIN * GRAIN
