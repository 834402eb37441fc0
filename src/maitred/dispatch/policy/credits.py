"""Credits of a replica: its load report less the requests that the report does not include.

After every step an engine reports its free sequences and KV blocks. Between two reports the gateway dispatches more
requests, so it subtracts those that the report does not include. A request is in one of three states::

    held --submitted--> unreported --next report--> reported

The first two states are subtracted; the report includes the third. The engine receives submissions in order, so the
number of unreported ones identifies them. A request that ends is no longer subtracted in any state, because the engine
itself frees what it had counted. All sums are integers, so they return to exactly zero.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from maitred.core.replica import LoadReport


class Cost(NamedTuple):
    """Slots, KV blocks and prompt tokens of a request, or of a capacity."""

    slots: int
    blocks: int
    prompt_tokens: int = 0
    """Prompt tokens to compute before the first token; they use no capacity."""

    def within(self, capacity: "Cost") -> bool:
        """Whether this cost fits into a capacity."""
        return self.slots <= capacity.slots and self.blocks <= capacity.blocks

    def at_most(self, limit: "Cost") -> "Cost":
        """Returns the cost with slots and blocks limited from above."""
        return Cost(min(self.slots, limit.slots), min(self.blocks, limit.blocks), self.prompt_tokens)

    def at_least(self, limit: "Cost") -> "Cost":
        """Returns the cost with slots and blocks limited from below."""
        return Cost(max(self.slots, limit.slots), max(self.blocks, limit.blocks), self.prompt_tokens)

    def plus(self, other: "Cost") -> "Cost":
        """Returns the sum of two costs."""
        return Cost(self.slots + other.slots, self.blocks + other.blocks, self.prompt_tokens + other.prompt_tokens)

    def minus(self, other: "Cost") -> "Cost":
        """Returns the difference of two costs, which may be negative."""
        return Cost(self.slots - other.slots, self.blocks - other.blocks, self.prompt_tokens - other.prompt_tokens)

    def part(self, share: float) -> "Cost":
        """Returns a share of the cost, rounded to integers."""
        return Cost(round(self.slots * share), round(self.blocks * share))


NOTHING = Cost(0, 0)


class CostSum:
    """Mutable sum of costs."""

    __slots__ = ("blocks", "prompt_tokens", "slots")

    def __init__(self) -> None:
        self.slots = 0
        self.blocks = 0
        self.prompt_tokens = 0

    def add(self, cost: Cost) -> None:
        """Adds one cost to the sum."""
        slots, blocks, prompt_tokens = cost
        self.slots += slots
        self.blocks += blocks
        self.prompt_tokens += prompt_tokens

    def subtract(self, cost: Cost) -> None:
        """Subtracts one cost from the sum."""
        slots, blocks, prompt_tokens = cost
        self.slots -= slots
        self.blocks -= blocks
        self.prompt_tokens -= prompt_tokens

    @property
    def cost(self) -> Cost:
        """Current sum as a `Cost`."""
        return Cost(self.slots, self.blocks, self.prompt_tokens)


PLENTY = 1 << 40
"""Assumed free blocks of a replica that does not report KV blocks."""


def request_cost(prompt_tokens: int, choices: int, output_tokens: int, block_tokens: int) -> Cost:
    """Returns the cost of one prompt whose choices are all as long as `output_tokens`.

    All choices share the full blocks of the prompt; each needs its own blocks for the rest of it and for its output.
    """
    shared, rest = divmod(prompt_tokens, block_tokens)
    return Cost(choices, shared + choices * -(-(rest + output_tokens) // block_tokens), prompt_tokens)


class CreditHold:
    """Credits that one request holds at a replica for all its prompts. `Credits.acquire` creates it."""

    __slots__ = ("_released", "_unsent", "cost", "unanswered_tokens", "unreported")

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._unsent = deque(costs)
        self._released = False
        cost = self.cost = costs[0] if len(costs) == 1 else total_cost(costs)
        """Total cost of the request."""
        self.unreported = cost
        """Part of the cost that no load report includes."""
        self.unanswered_tokens = cost.prompt_tokens
        """Prompt tokens of prompts that have produced no token."""


class Credits:
    """Credit account of one replica.

    Attributes:
        request_count: Number of requests that hold credits.
    """

    def __init__(self) -> None:
        self._reported_free = NOTHING
        self._reported: LoadReport | None = None
        """Last load report; None: the capacity is an estimate."""
        self._overcommit_slots = 0
        self._overcommits = False
        self._total = NOTHING
        self._unreported = CostSum()
        self._submissions: deque[tuple[CreditHold, Cost]] = deque()
        self._outstanding = CostSum()
        self.request_count = 0
        self._unanswered_tokens = 0
        self._busy = False

    @property
    def free(self) -> Cost:
        """Credits that can be acquired now; negative if the engine uses more than predicted."""
        return self._reported_free.minus(self._unreported.cost)

    def certainly_fits(self, cost: Cost, headroom: float) -> bool:
        """Whether a cost certainly fits beside a share of the capacity that is kept as headroom."""
        report, total, unreported = self._reported_free, self._total, self._unreported
        return (
            cost.slots + 1 + headroom * total.slots <= report.slots - unreported.slots
            and cost.blocks + 1 + headroom * total.blocks <= report.blocks - unreported.blocks
        )

    @property
    def overcommit_slots(self) -> int:
        """Slots beyond the free ones that may be overcommitted.

        If `free` is negative, that many of them are already used.
        """
        return self._overcommit_slots

    @property
    def overcommits(self) -> bool:
        """Whether the replica overcommits slots, so that no slots need to be kept as headroom."""
        return self._overcommits

    @property
    def total(self) -> Cost:
        """Total capacity of the replica."""
        return self._total

    @property
    def unreported(self) -> Cost:
        """Cost of dispatched requests that no report includes yet."""
        return self._unreported.cost

    @property
    def unanswered_tokens(self) -> int:
        """Prompt tokens of dispatched prompts that have produced no token."""
        return self._unanswered_tokens

    @property
    def outstanding(self) -> Cost:
        """Cost of all requests that hold credits."""
        return self._outstanding.cost

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits at the replica, as far as known."""
        return not self._busy and not self.request_count

    def on_report(self, load: LoadReport, unreported_count: int, max_sequences: int) -> None:
        """Applies a load report, which may be the same as before.

        Args:
            load: The report.
            unreported_count: Number of submissions that the report does not include.
            max_sequences: Maximum number of sequences that the replica runs at once.
        """
        while len(self._submissions) > unreported_count:
            hold, cost = self._submissions.popleft()
            self._on_reported(hold, cost)
        if load is self._reported:
            return
        self._reported = load
        # An engine may temporarily limit its batch to keep the inter-token latency low.
        taken_now = load.running - load.guests + load.waiting + load.free_sequences
        self._total = Cost(min(max_sequences, max(1, taken_now)), load.total_blocks - load.pinned_blocks)
        self._reported_free = Cost(load.free_sequences, load.free_blocks - load.promised_blocks)
        self._overcommit_slots = load.guest_places
        self._overcommits = self._overcommits or load.guests + load.guest_places > 0
        self._busy = load.running + load.waiting > 0

    def estimate(self, slots: int) -> None:
        """Sets the capacity without a report: this many slots, less those that are held."""
        if self._submissions:
            self._submissions.clear()
        left = slots - self._outstanding.slots + self._unreported.slots
        if self._reported is None and self._total.slots == slots and self._reported_free.slots == left:
            return  # the estimate has not changed
        self._reported = None
        self._total = Cost(slots, PLENTY)
        self._reported_free = Cost(left, PLENTY)
        self._overcommit_slots = 0
        self._busy = False

    def acquire(self, costs: Sequence[Cost]) -> CreditHold:
        """Acquires the credits of a request; `costs` has one cost per prompt, in submission order."""
        hold = CreditHold(costs)
        self.request_count += 1
        self._unanswered_tokens += hold.unanswered_tokens
        self._outstanding.add(hold.cost)
        self._unreported.add(hold.cost)
        return hold

    def on_submitted(self, hold: CreditHold) -> None:
        """Records that the next prompt of a request was sent to the engine."""
        if hold._unsent:
            self._submissions.append((hold, hold._unsent.popleft()))

    def on_answered(self, hold: CreditHold) -> None:
        """Records the first token of a request: the engine now counts all its prompts."""
        self._unanswered_tokens -= hold.unanswered_tokens
        hold.unanswered_tokens = 0
        while hold._unsent:
            self._on_reported(hold, hold._unsent.popleft())

    def release(self, hold: CreditHold) -> None:
        """Releases the credits of a request. A second call has no effect."""
        if hold._released:
            return
        hold._released = True
        self.request_count -= 1
        # The engine is assumed to drop prompts that are not computed yet.
        self._unanswered_tokens -= hold.unanswered_tokens
        hold.unanswered_tokens = 0
        self._outstanding.subtract(hold.cost)
        if hold.unreported is not NOTHING:
            self._unreported.subtract(hold.unreported)
            hold.unreported = NOTHING

    def _on_reported(self, hold: CreditHold, cost: Cost) -> None:
        """Marks a cost as included in the load report."""
        if not hold._released:
            hold.unreported = NOTHING if cost is hold.unreported else hold.unreported.minus(cost)
            self._unreported.subtract(cost)


def total_cost(costs: Sequence[Cost]) -> Cost:
    """Returns the sum of several costs."""
    if len(costs) == 1:
        return costs[0]
    return Cost(
        sum(cost.slots for cost in costs),
        sum(cost.blocks for cost in costs),
        sum(cost.prompt_tokens for cost in costs),
    )
