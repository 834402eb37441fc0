"""The tallies that one set of claims is on, side by side.

All requests of one key to one model claim the same: the same counters, in the same order, for a size of their own. So
which tallies these are is found out once, and a request reserves and settles in one pass over them, with additions in
place of look-ups and calls.
"""

from collections.abc import Mapping, Sequence

from maitred.core.counters import CounterState, LimitClaim, RequestSize
from maitred.store.counters.tallies import BudgetTally, ConcurrencyTally, Tally, TokenBucket

_UNREAD = CounterState(0, 0, 0.0)


class TallyGroup:
    """One pass for each step. Amounts and rooms are lists in the order of the claims.

    Args:
        claims: No two on one counter.
        tallies: Of each claim, the one that it is on.
    """

    __slots__ = ("_buckets", "_budgets", "_pools", "_remaining", "_terms", "claims", "tallies")

    def __init__(self, claims: Sequence[LimitClaim], tallies: Sequence[Tally]) -> None:
        self.claims = claims
        self.tallies = tallies
        # What each step needs of every claim, without going to it.
        self._remaining = [(claim.capacity, tally) for claim, tally in zip(claims, tallies, strict=True)]
        self._terms = [(claim.fixed, claim.per_prompt, claim.per_output, claim.divisor) for claim in claims]
        self._buckets: list[tuple[int, LimitClaim, TokenBucket]] = []
        self._pools: list[tuple[int, LimitClaim, ConcurrencyTally]] = []
        self._budgets: list[tuple[int, LimitClaim, BudgetTally]] = []
        for number, (claim, tally) in enumerate(zip(claims, tallies, strict=True)):
            if isinstance(tally, TokenBucket):
                self._buckets.append((number, claim, tally))
            elif isinstance(tally, BudgetTally):
                self._budgets.append((number, claim, tally))
            else:
                self._pools.append((number, claim, tally))

    def refresh(self, now_us: int) -> list[int]:
        """What there is room for now; negative when settling took more than there was."""
        for _, claim, bucket in self._buckets:
            bucket.refresh(claim, now_us)
        return [capacity - tally.taken for capacity, tally in self._remaining]

    def amounts(self, output: int, size: RequestSize) -> list[int]:
        """What a request of this size claims for so much output of each choice: `LimitClaim.amount`, spelled out."""
        prompt_tokens, wanted = size.prompt_tokens, size.choices * output
        return [
            -(-(fixed + per_prompt * prompt_tokens + per_output * wanted) // divisor)
            for fixed, per_prompt, per_output, divisor in self._terms
        ]

    def take(self, amounts: Sequence[int], now_us: int) -> None:
        """Reserves, at the moment of the last look."""
        for number, _, bucket in self._buckets:
            bucket.holders += 1
            bucket.take(amounts[number], now_us)
        for number, _, pool in self._pools:
            pool.holders += 1
            pool.taken += amounts[number]
        for number, _, budget in self._budgets:
            budget.holders += 1
            budget.taken += amounts[number]

    def settle(self, taken: Sequence[int], used: Mapping[str, int], now_us: int) -> None:
        """Ends what `take` began: charges what was used, by counter, and gives the rest back."""
        for number, claim, bucket in self._buckets:
            bucket.holders -= 1
            amount = used[claim.counter] if claim.counter in used else 0  # noqa: SIM401 - spares a call for each
            if amount != taken[number]:
                bucket.charge(amount - taken[number], now_us)
        for number, _, pool in self._pools:
            pool.holders -= 1
            pool.taken -= taken[number]
        for number, claim, budget in self._budgets:
            amount = used[claim.counter] if claim.counter in used else 0  # noqa: SIM401
            budget.holders -= 1
            budget.charged += amount
            budget.taken += amount - taken[number]

    def readings(self, wall_s: float) -> list[CounterState]:
        """How all of them stand, after the last look and what was taken since."""
        readings = [_UNREAD] * len(self.claims)
        for number, claim, bucket in self._buckets:
            left = claim.capacity - bucket.taken
            readings[number] = CounterState(claim.capacity, left, bucket.reset_s, bucket.taken)
        for number, claim, pool in self._pools:
            readings[number] = CounterState(claim.capacity, claim.capacity - pool.taken, 0.0, pool.taken)
        for number, claim, budget in self._budgets:
            left, charged = claim.capacity - budget.taken, budget.charged
            reset_s = 0.0 if claim.ends_s is None or claim.ends_s < wall_s else claim.ends_s - wall_s
            readings[number] = CounterState(claim.capacity, left, reset_s, charged, budget.taken - charged)
        return readings
