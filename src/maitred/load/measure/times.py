"""Definitions of TTFT, ITL, TPOT and end-to-end time, computed from the columns of a run.

All latencies start when a request was *due*, not when it was sent. If a server (or a limit on open connections) delays
the tester, it also delays its users, and the latency must include this (coordinated omission).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.load.measure.columns import RequestColumns
from maitred.load.measure.record import UserOutcome
from maitred.load.spec import ObjectivesSpec

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class DeliveredTokens(NamedTuple):
    """Delivered tokens: when they arrived, how many, and which request each belongs to."""

    at_s: Floats
    tokens: Floats
    request: NDArray[np.int64]


@dataclass(frozen=True)
class RequestTimes:
    """Times of the requests of a run as arrays with one value per request; NaN: it has none.

    Args:
        requests: Columns of the requests.
        gaps_us: Times between the pieces of each answer, request after request, in microseconds.
    """

    requests: RequestColumns
    gaps_us: NDArray[np.uint32]

    @cached_property
    def complete(self) -> Flags:
        """Whether each answer is complete."""
        return self._ended_as(UserOutcome.COMPLETE)

    @cached_property
    def cancelled(self) -> Flags:
        """Whether the user left on purpose."""
        return self._ended_as(UserOutcome.CANCELLED)

    @cached_property
    def intended_s(self) -> Floats:
        """When the request was due."""
        return self._column("intended_s")

    @cached_property
    def ended_s(self) -> Floats:
        """When the outcome of each request was known."""
        return self._column("ended_s")

    @cached_property
    def begun_s(self) -> Floats:
        """When the user saw the first piece of the answer, or the whole answer if it was not streamed."""
        first_s = self._column("first_s")
        return np.where(np.isnan(first_s) & self.complete, self.ended_s, first_s)

    @cached_property
    def ttft_s(self) -> Floats:
        """Time to first token: from the due time to the first piece of text, for every outcome."""
        return self._column("first_s") - self.intended_s

    @cached_property
    def e2e_s(self) -> Floats:
        """End-to-end time: from the due time to the last piece of text, for complete answers.

        Incomplete answers have no end-to-end time: otherwise a server would look faster when it cuts its longest
        answers. An answer without any text ends when its outcome was known.
        """
        last_s = self._column("last_s")
        end_s = np.where(np.isnan(last_s), self.ended_s, last_s)
        return np.where(self.complete, end_s - self.intended_s, np.nan)

    @cached_property
    def tpot_s(self) -> Floats:
        """Time per output token after the first: ``(last - first) / (output_tokens - 1)``.

        It is defined for answers with at least 2 tokens by the server's count and at least 2 pieces: an answer that
        arrives at once does not show its rate.
        """
        tokens = self._column("output_tokens").astype(np.float64)
        paced = (tokens >= 2) & (self.pieces >= 2)
        span_s = self._column("last_s") - self._column("first_s")
        return np.where(paced, span_s / np.where(paced, tokens - 1, 1), np.nan)

    @cached_property
    def pieces(self) -> NDArray[np.int64]:
        """Number of pieces of text that arrived."""
        return self._column("pieces")

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """Number of tokens that arrived: by the server's count, or one per piece if there is no count."""
        counted = self._column("output_tokens")
        return np.where(counted > 0, counted, self.pieces)

    @cached_property
    def itl_s(self) -> Floats:
        """Inter-token latency: the time between one piece of text and the next, pooled over all requests."""
        values: Floats = self.gaps_us / 1e6
        return values

    @cached_property
    def itl_request(self) -> NDArray[np.int64]:
        """Index of the request that each value of `itl_s` belongs to."""
        return np.repeat(np.arange(len(self.pieces)), np.maximum(self.pieces - 1, 0))

    @cached_property
    def arrival_s(self) -> Floats:
        """When each piece of text arrived, request after request."""
        answered = self.pieces > 0
        pieces = self.pieces[answered]
        first_us = np.rint(self._column("first_s")[answered] * 1e6).astype(np.int64)
        starts = np.cumsum(pieces) - pieces
        steps_us = np.zeros(int(pieces.sum()), dtype=np.int64)
        is_start = np.zeros(len(steps_us), dtype=np.bool_)
        is_start[starts] = True
        steps_us[~is_start] = self.gaps_us
        since_us = np.cumsum(steps_us)
        at_s: Floats = (since_us + np.repeat(first_us - since_us[starts], pieces)) / 1e6
        return at_s

    @cached_property
    def arrival_request(self) -> NDArray[np.int64]:
        """Index of the request that each value of `arrival_s` belongs to."""
        return np.repeat(np.arange(len(self.pieces)), self.pieces)

    @cached_property
    def delivered(self) -> "DeliveredTokens":
        """Returns when tokens arrived, for all requests.

        The tokens of a request are spread evenly over its pieces, because a piece may carry several tokens. An answer
        that was not streamed arrives as one piece when it ends.
        """
        whole = np.flatnonzero(self.complete & (self.pieces == 0))
        per_piece: Floats = self.tokens / np.maximum(self.pieces, 1)
        return DeliveredTokens(
            at_s=np.concatenate([self.arrival_s, self.ended_s[whole]]),
            tokens=np.concatenate([per_piece[self.arrival_request], self.tokens[whole]]),
            request=np.concatenate([self.arrival_request, whole]),
        )

    @cached_property
    def itl_arrival_s(self) -> Floats:
        """Arrival time of the piece that ended each gap of `itl_s`."""
        starts = np.cumsum(self.pieces) - self.pieces
        later = np.ones(len(self.arrival_s), dtype=np.bool_)
        later[starts[self.pieces > 0]] = False
        return self.arrival_s[later]

    def met_flags(self, objectives: ObjectivesSpec) -> Flags:
        """Returns which requests are complete and meet all given objectives.

        An answer of one token has no time per token, so it meets any such objective.
        """
        met = self.complete.copy()
        for bound_s, times_s in (
            (objectives.ttft_s, self.begun_s - self.intended_s),
            (objectives.tpot_s, self.tpot_s),
            (objectives.e2e_s, self.e2e_s),
        ):
            if bound_s is not None:
                met &= ~(times_s > bound_s)
        return met

    def _column(self, name: str) -> NDArray[Any]:
        return self.requests.array(name)

    def _ended_as(self, outcome: UserOutcome) -> Flags:
        return np.array([it is outcome for it in self.requests.outcome], dtype=np.bool_)
