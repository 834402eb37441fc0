"""Group of counter states that belong to one set of claims.

All requests of one key to one model claim the same counters in the same order; only the amounts differ by request size.
The counter states are therefore looked up once, and a request reserves and settles in one pass over them, with
additions instead of look-ups and calls.
"""

from collections.abc import Mapping, Sequence

from maitred.core.counters import CounterState, LimitClaim, RequestSize
from maitred.store.counters.tallies import BudgetTally, ConcurrencyTally, Tally, TokenBucket

_UNSET_STATE = CounterState(0, 0, 0.0)


class TallyGroup:
    """Counter states of one set of claims; each step is one pass over them.

    Amounts are lists in the order of the claims.

    Args:
        claims: The claims; each uses a different counter.
        tallies: The counter state of each claim.
    """

    __slots__ = ("_buckets", "_budgets", "_capacities", "_pools", "_terms", "claims", "tallies")

    def __init__(self, claims: Sequence[LimitClaim], tallies: Sequence[Tally]) -> None:
        self.claims = claims
        self.tallies = tallies
        # This list has the values of every claim that each step needs.
        self._capacities = [(claim.capacity, tally) for claim, tally in zip(claims, tallies, strict=True)]
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

    def refresh_remaining(self, now_us: int) -> list[int]:
        """Refreshes the buckets and returns the rest of each claim; negative after an overcharge."""
        for _, claim, bucket in self._buckets:
            bucket.refresh(claim, now_us)
        return [capacity - tally.taken for capacity, tally in self._capacities]

    def amounts(self, output: int, size: RequestSize) -> list[int]:
        """Returns the amounts that a request of this size claims for that output of each choice.

        The arithmetic is that of `LimitClaim.amount`, inlined.
        """
        prompt_tokens, output_tokens = size.prompt_tokens, size.choices * output
        return [
            -(-(fixed + per_prompt * prompt_tokens + per_output * output_tokens) // divisor)
            for fixed, per_prompt, per_output, divisor in self._terms
        ]

    def take(self, amounts: Sequence[int], now_us: int) -> None:
        """Reserves amounts at the time of the last refresh."""
        for number, _, bucket in self._buckets:
            bucket.lease_count += 1
            bucket.take(amounts[number], now_us)
        for number, _, pool in self._pools:
            pool.lease_count += 1
            pool.taken += amounts[number]
        for number, _, budget in self._budgets:
            budget.lease_count += 1
            budget.taken += amounts[number]

    def settle(self, taken: Sequence[int], used: Mapping[str, int], now_us: int) -> None:
        """Ends a reservation: charges the used amount of each counter and returns the rest."""
        for number, claim, bucket in self._buckets:
            bucket.lease_count -= 1
            amount = used[claim.counter] if claim.counter in used else 0  # noqa: SIM401 - spares a call for each
            if amount != taken[number]:
                bucket.charge(amount - taken[number], now_us)
        for number, _, pool in self._pools:
            pool.lease_count -= 1
            pool.taken -= taken[number]
        for number, claim, budget in self._budgets:
            amount = used[claim.counter] if claim.counter in used else 0  # noqa: SIM401
            budget.lease_count -= 1
            budget.charged += amount
            budget.taken += amount - taken[number]

    def states(self, wall_s: float) -> list[CounterState]:
        """Returns the states of all counters, as of the last refresh and the later changes."""
        states = [_UNSET_STATE] * len(self.claims)
        for number, claim, bucket in self._buckets:
            remaining = claim.capacity - bucket.taken
            states[number] = CounterState(claim.capacity, remaining, bucket.reset_s, bucket.taken)
        for number, claim, pool in self._pools:
            states[number] = CounterState(claim.capacity, claim.capacity - pool.taken, 0.0, pool.taken)
        for number, claim, budget in self._budgets:
            remaining, charged = claim.capacity - budget.taken, budget.charged
            reset_s = 0.0 if claim.ends_s is None or claim.ends_s < wall_s else claim.ends_s - wall_s
            states[number] = CounterState(
                claim.capacity, remaining, reset_s, used=charged, reserved=budget.taken - charged
            )
        return states
