"""Decision whether drafts pay: their expected gain is compared with the measured cost of their rows.

A step of `B` decodes takes `T` seconds, `T / B` for each token. With `R` draft rows the step takes longer. This extra
time per row, in units of `T / B`, is the *price* of a row: the number of tokens that could be generated in that time
without drafts. So drafts pay if their share of accepted tokens is above the price. For a single sequence, a step reads
all weights for one row, and a few further rows cost little: a price of 0.1, for example. In a full batch every row
takes equally long: a price of 1, at which no draft pays. The change between the two cases is measured, not configured.

Prices are stored per binary order of magnitude of `B` and of `R`, because the time does not rise linearly with the
rows. Where no price was measured, the step-time model predicts it, and the number of rows grows by doubling. So a wrong
first prediction costs little. `T` comes from the same model, corrected by occasional steps without drafts. Drafts that
did not pay are tried again from time to time, because the machine may have been busy with other work. Repeated failures
make these trials less frequent.

Drafts of a draft model also cost the time for writing them. These seconds are measured separately.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from maitred.core.replica import StepTimes
from maitred.engine.scheduler.step_times import StepWork

_MARGIN = 1.03
"""Minimum expected speedup of a step for which drafts are used."""
_TRIAL_EVERY, _LONGEST_PATIENCE = 100, 1600
"""Steps in which drafts did not pay, from one trial to the next; the first, and the most after fruitless ones..."""
_FIRST_TRIAL = 8
"""Steps before the first trial at a number of decodes for which no draft row was ever measured."""
_TRIAL_PART = 8
"""...and so few rows has a trial, by the decodes. So trials cost at most 1/800 of the time."""
_PLAIN_EVERY = 50
"""Steps with drafts between two steps without drafts."""
_FADE = 0.9
_TRIAL_FADE = 0.6
_LEAST_PRICE, _HIGHEST_PRICE = -1.0, 3.0
"""Range of the price that a single measured step can indicate."""
_PLAIN_WEIGHT = 0.2


@dataclass(slots=True)
class _Price:
    """Price of a row: tokens divided by rows; older values fade."""

    tokens: float = 0.0
    rows: float = 0.0
    at: int = 0
    """Step in which the price was last measured."""


class SpeculationBenefit:
    """Decision how many draft rows a step has."""

    def __init__(self) -> None:
        self._prices: dict[tuple[int, int], _Price] = {}
        self._plain: dict[int, float] = {}
        """Order of magnitude of decodes -> measured over predicted time of steps without drafts."""
        self._steps = 0
        self._tried = 0
        """Last step in which drafts paid or were tried."""
        self._patience = _TRIAL_EVERY
        self._tested: set[int] = set()
        """Orders of magnitude of decodes with which draft rows were measured."""
        self._busy = 0
        """Number of steps with drafts since the last step without drafts."""

    def on_step_time(self, work: StepWork, seconds: float, times: StepTimes) -> None:
        """Records the duration of a step (more than 0).

        Args:
            work: Work of the step; a step with prefill is ignored.
            seconds: Time from one plan to the next, without the time for writing drafts.
            times: Model of step times before this step.
        """
        self._steps += 1
        order = work.decodes.bit_length()
        predicted_s = times.decoding(work.decodes, work.context_tokens)
        if not work.decodes or work.prefill_tokens or predicted_s <= 0:
            return
        known = self._plain.get(order)
        ratio = seconds / predicted_s
        if not work.drafts:
            if known is None:
                self._plain[order] = ratio
            else:
                self._plain[order] = known + _PLAIN_WEIGHT * (min(2 * known, ratio) - known)
            return
        extra = (ratio / (known or 1.0) - 1.0) * work.decodes
        price = self._prices.setdefault((order, work.drafts.bit_length()), _Price())
        fade = _FADE if self._steps - price.at < _TRIAL_EVERY else _TRIAL_FADE
        price.tokens = fade * price.tokens + min(_HIGHEST_PRICE * work.drafts, max(_LEAST_PRICE * work.drafts, extra))
        price.rows = fade * price.rows + work.drafts
        price.at = self._steps
        self._tested.add(order)

    def may_pay(self, work: StepWork, most: int, times: StepTimes) -> bool:
        """Returns whether up to `most` rows would pay if all were right, or a trial is due."""
        decodes = work.decodes
        for _, rows, price in self._row_costs(work, most, times):
            if decodes + rows > _MARGIN * (decodes + price * rows):
                return True
        return self._due(work)

    def rows(
        self, work: StepWork, gains: Sequence[float], times: StepTimes, writing_s: Sequence[float] | None = None
    ) -> int:
        """Returns the number of draft rows that the step should have.

        Args:
            work: Work of the step's decodes.
            gains: Expected tokens from the first row, from the first two rows together, and so on.
            times: Model of step times.
            writing_s: Seconds to write the first row, the first two rows, and so on; None: no time.
        """
        best = self._best(work, gains, times, writing_s)
        if best:
            self._patience = _TRIAL_EVERY
        elif self._due(work):
            best = min(len(gains), max(1, work.decodes // _TRIAL_PART))
            self._tried = self._steps
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        if best:
            self._busy += 1
            if self._busy > _PLAIN_EVERY:
                best = 0
        if best:
            self._tried = self._steps
        else:
            self._busy = 0
        return best

    def _due(self, work: StepWork) -> bool:
        """Returns whether a trial is due."""
        patience = self._patience if work.decodes.bit_length() in self._tested else _FIRST_TRIAL
        return self._steps - self._tried >= patience

    def _best(self, work: StepWork, gains: Sequence[float], times: StepTimes, writing_s: Sequence[float] | None) -> int:
        decodes = work.decodes
        token_s = times.decoding(decodes, work.context_tokens) * self._plain.get(decodes.bit_length(), 1.0) / decodes
        best, highest = 0, _MARGIN
        for first, last, price in self._row_costs(work, len(gains), times):
            for rows in range(first, last + 1):
                lost = price * rows
                if writing_s is not None and token_s > 0:
                    lost += writing_s[rows - 1] / token_s
                rate = (decodes + gains[rows - 1]) / (decodes + lost)
                if rate > highest:
                    best, highest = rows, rate
        return best

    def _row_costs(self, work: StepWork, most: int, times: StepTimes) -> Iterator[tuple[int, int, float]]:
        """Yields per order of magnitude its first and last row number, up to `most`, and the row price."""
        decodes, order = work.decodes, work.decodes.bit_length()
        if order not in self._plain:
            return
        price = max(0.0, self._row_price(work, times))
        rows, seen = 1, True
        while rows <= most and seen:
            first, rows = rows, min(2 * rows - 1, most)
            known = self._prices.get((order, rows.bit_length()))
            seen = known is not None or rows < decodes // 4
            if known is not None:
                price = max(0.0, known.tokens / known.rows)
            yield first, rows, price
            rows += 1

    def _row_price(self, work: StepWork, times: StepTimes) -> float:
        """Returns the price of a row that the step-time model predicts."""
        row_s = times.token_s + times.decode_s + times.pair_s * work.context_tokens / work.decodes
        return row_s * work.decodes / max(1e-9, times.decoding(work.decodes, work.context_tokens))
