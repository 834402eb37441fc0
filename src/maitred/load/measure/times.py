"""The definitions: what TTFT, ITL, TPOT and end-to-end time are, from the columns of a run.

All latencies start when a request was *due*, not when it was sent: a server (or a limit on open connections) that keeps
the tester waiting keeps its users waiting, and must not be able to hide that (coordinated omission).
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
    """Tokens on their way: when so many of them arrived, and which request they belong to."""

    at_s: Floats
    tokens: Floats
    request: NDArray[np.int64]


@dataclass(frozen=True)
class RequestTimes:
    """The times of a run's requests as arrays, one value per request; NaN where it has none.

    Args:
        requests: The columns.
        gaps_us: Times between the pieces of each answer, request after request, in microseconds.
    """

    requests: RequestColumns
    gaps_us: NDArray[np.uint32]

    @cached_property
    def complete(self) -> Flags:
        """Whether the answer came whole."""
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
        """When its outcome was known."""
        return self._column("ended_s")

    @cached_property
    def begun_s(self) -> Floats:
        """When its user saw the first of the answer: its first piece, or the whole if it was not streamed."""
        first_s = self._column("first_s")
        return np.where(np.isnan(first_s) & self.complete, self.ended_s, first_s)

    @cached_property
    def ttft_s(self) -> Floats:
        """Time to first token: from due to the first piece of text, however the answer ended."""
        return self._column("first_s") - self.intended_s

    @cached_property
    def e2e_s(self) -> Floats:
        """End to end: from due to the last piece of text, of complete answers.

        Half an answer has no end: to count it would make a server faster by cutting its longest answers. An answer
        without any text ends when its outcome was known.
        """
        last_s = self._column("last_s")
        end_s = np.where(np.isnan(last_s), self.ended_s, last_s)
        return np.where(self.complete, end_s - self.intended_s, np.nan)

    @cached_property
    def tpot_s(self) -> Floats:
        """Time per output token after the first: ``(last - first) / (output_tokens - 1)``.

        Of answers that the server counted at least 2 tokens for and that came in at least 2 pieces: one that arrives
        at once does not show its pace.
        """
        tokens = self._column("output_tokens").astype(np.float64)
        paced = (tokens >= 2) & (self.pieces >= 2)
        span_s = self._column("last_s") - self._column("first_s")
        return np.where(paced, span_s / np.where(paced, tokens - 1, 1), np.nan)

    @cached_property
    def pieces(self) -> NDArray[np.int64]:
        """Pieces of text that arrived."""
        return self._column("pieces")

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens that arrived: as the server counted, or one per piece where it did not come to say."""
        counted = self._column("output_tokens")
        return np.where(counted > 0, counted, self.pieces)

    @cached_property
    def itl_s(self) -> Floats:
        """Inter-token latency: the time between one piece of text and the next, pooled over all requests."""
        values: Floats = self.gaps_us / 1e6
        return values

    @cached_property
    def itl_request(self) -> NDArray[np.int64]:
        """Which request each of `itl_s` belongs to."""
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
        """Which request each of `arrival_s` belongs to."""
        return np.repeat(np.arange(len(self.pieces)), self.pieces)

    @cached_property
    def delivered(self) -> "DeliveredTokens":
        """When tokens arrived, of all requests.

        A request's tokens are spread evenly over its pieces, since a piece may carry several. An answer that was not
        streamed arrives as one, when it ends.
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
        """When the piece that ended each of `itl_s` arrived."""
        starts = np.cumsum(self.pieces) - self.pieces
        later = np.ones(len(self.arrival_s), dtype=np.bool_)
        later[starts[self.pieces > 0]] = False
        return self.arrival_s[later]

    def met_flags(self, objectives: ObjectivesSpec) -> Flags:
        """Which requests are complete and meet all objectives that are given.

        An answer of one token meets any time per token, since it has none.
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
