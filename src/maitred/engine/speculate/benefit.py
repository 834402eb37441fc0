"""Whether drafts pay: what they are expected to save against what their rows were measured to cost.

A step of `B` decodes takes `T` seconds, `T / B` for each token. What it takes longer with `R` rows of drafts, by the
row and in units of `T / B`, is the *price* of a row: so many tokens would the others have got in that time. So drafts
pay if the share of them that is right is above the price. For a single sequence a step reads all weights for one row,
and some more hardly count: a price of 0.1, say. In a full batch every row takes as long as any: a price of 1, which no
guess is worth. No setting says where the one turns into the other.

Prices are kept by the binary orders of magnitude of `B` and of `R`, for time does not rise evenly with the rows. As far
as nothing was measured the step-time model says what a row costs, and rows become more by doubling: so a wrong first
guess costs little. `T` comes from the same model, corrected by steps without drafts; there is such a step now and then.
And what was found not to pay is tried again now and then, for the machine may have been busy with something else; ever
less often, if that is what is found again.

Drafts that a model has to write first cost what that takes, too. Those seconds are known by themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from maitred.core.replica import StepTimes
from maitred.engine.scheduler.step_times import StepWork

_MARGIN = 1.03
"""By so much must drafts be expected to speed a step up."""
_TRIAL_EVERY, _LONGEST_PATIENCE = 100, 1600
"""Steps in which drafts did not pay, from one trial to the next; the first, and the most after fruitless ones..."""
_FIRST_TRIAL = 8
"""Steps, where no row was ever measured beside so many decodes: what the model says of one is then a guess."""
_TRIAL_PART = 8
"""...and so few rows has a trial, by the decodes. It then costs a part in eight hundred at most."""
_PLAIN_EVERY = 50
"""Steps with drafts."""
_FADE = 0.9
_TRIAL_FADE = 0.6
_LEAST_PRICE, _HIGHEST_PRICE = -1.0, 3.0
"""That one measured step can speak for."""
_PLAIN_WEIGHT = 0.2


@dataclass(slots=True)
class _Price:
    """Price of a row: tokens over rows; older ones fade."""

    tokens: float = 0.0
    rows: float = 0.0
    at: int = 0
    """The step in which it was measured last."""


class SpeculationBenefit:
    """Decides how many rows of drafts a step has."""

    def __init__(self) -> None:
        self._prices: dict[tuple[int, int], _Price] = {}
        self._plain: dict[int, float] = {}
        """By order of magnitude of the decodes: what steps without drafts take, over what the model says."""
        self._steps = 0
        self._tried = 0
        """The last step in which drafts paid, or were tried."""
        self._patience = _TRIAL_EVERY
        self._tested: set[int] = set()
        """Orders of magnitude of decodes beside which rows were measured."""
        self._busy = 0
        """Steps since there were none."""

    def on_step_time(self, work: StepWork, seconds: float, times: StepTimes) -> None:
        """A step took so long (more than 0).

        Args:
            work: What it computed; one with prompts tells nothing.
            seconds: From one plan to the next, less what it took to write drafts.
            times: What was known before it.
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
        """Whether some rows, up to `most`, would pay if all of them were right; or it is time to try."""
        decodes = work.decodes
        for _, rows, price in self._row_costs(work, most, times):
            if decodes + rows > _MARGIN * (decodes + price * rows):
                return True
        return self._due(work)

    def rows(
        self, work: StepWork, gains: Sequence[float], times: StepTimes, writing_s: Sequence[float] | None = None
    ) -> int:
        """How many rows of drafts the step should have.

        Args:
            work: Its decodes.
            gains: Tokens that the first row saves on average, the first two rows together, and so on.
            times: What steps take.
            writing_s: What it takes to have the first row written, the first two, and so on; None: nothing.
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
        """Whether it is time for a trial."""
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
        """Up to `most` rows: the first and the last number of an order of magnitude, and the price of each row."""
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
        """The price of a row as far as the model knows."""
        row_s = times.token_s + times.decode_s + times.pair_s * work.context_tokens / work.decodes
        return row_s * work.decodes / max(1e-9, times.decoding(work.decodes, work.context_tokens))
