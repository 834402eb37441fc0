"""Credits of a replica: its report, corrected by what the report cannot know yet.

An engine says after every step how many sequences and KV blocks it has left. Between two reports the gateway goes on
releasing requests, so it subtracts what it has released and the report does not contain. A request is in one of three
states here::

    held --submitted--> unheard --the report counts it--> heard

The first two are subtracted, the third is the engine's to count. Submissions are heard in the order in which they were
sent, so the number of unheard ones says which they are. What leaves is subtracted no more, whatever state it was in:
the engine gives back by itself what it had counted. All sums are of integers, so they come back to exactly zero.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from maitred.core.replica import LoadReport


class Cost(NamedTuple):
    """Places in a batch and blocks of KV cache; and the work that comes with them, which needs no room."""

    slots: int
    blocks: int
    prompt_tokens: int = 0
    """To be computed before the first token."""

    def within(self, capacity: "Cost") -> bool:
        """Whether there is room for it."""
        return self.slots <= capacity.slots and self.blocks <= capacity.blocks

    def at_most(self, limit: "Cost") -> "Cost":
        """Cut to the limit, in both."""
        return Cost(min(self.slots, limit.slots), min(self.blocks, limit.blocks), self.prompt_tokens)

    def at_least(self, limit: "Cost") -> "Cost":
        """Raised to the limit, in both."""
        return Cost(max(self.slots, limit.slots), max(self.blocks, limit.blocks), self.prompt_tokens)

    def plus(self, other: "Cost") -> "Cost":
        """Returns the sum of two costs."""
        return Cost(self.slots + other.slots, self.blocks + other.blocks, self.prompt_tokens + other.prompt_tokens)

    def minus(self, other: "Cost") -> "Cost":
        """Returns the difference of two costs; it can be below zero."""
        return Cost(self.slots - other.slots, self.blocks - other.blocks, self.prompt_tokens - other.prompt_tokens)

    def part(self, share: float) -> "Cost":
        """A share of it, to the nearest whole."""
        return Cost(round(self.slots * share), round(self.blocks * share))


NOTHING = Cost(0, 0)


class CostSum:
    """Running sum of costs that come and go."""

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
        """Sum as a cost, as of now."""
        return Cost(self.slots, self.blocks, self.prompt_tokens)


PLENTY = 1 << 40
"""Blocks of a replica that does not count any."""


def request_cost(prompt_tokens: int, choices: int, output_tokens: int, block_tokens: int) -> Cost:
    """Returns the cost of one prompt whose choices are all as long as `output_tokens`.

    The choices share the whole blocks of the prompt; each has the rest of it, and its answer, for itself.
    """
    shared, rest = divmod(prompt_tokens, block_tokens)
    return Cost(choices, shared + choices * -(-(rest + output_tokens) // block_tokens), prompt_tokens)


class CreditHold:
    """Credits of one request at a replica, all its prompts together. Made by `Credits.acquire`."""

    __slots__ = ("_left", "_unsent", "cost", "unanswered_tokens", "uncounted")

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._unsent = deque(costs)
        self._left = False
        cost = self.cost = costs[0] if len(costs) == 1 else total_cost(costs)
        """All together."""
        self.uncounted = cost
        """Of this, what no report contains."""
        self.unanswered_tokens = cost.prompt_tokens
        """Of prompts of which nothing has come back."""


class Credits:
    """The account of one replica.

    Attributes:
        held: Requests that were released and have not left.
    """

    def __init__(self) -> None:
        self._report = NOTHING
        self._reported: LoadReport | None = None
        """The report that this is from; None: it is an estimate."""
        self._overcommit_slots = 0
        self._overcommits = False
        self._total = NOTHING
        self._uncounted = CostSum()
        self._sent: deque[tuple[CreditHold, Cost]] = deque()
        self._outstanding = CostSum()
        self.held = 0
        self._unanswered_tokens = 0
        self._busy = False

    @property
    def free(self) -> Cost:
        """Credits that can be acquired now; below zero when the engine needs more than was thought."""
        return self._report.minus(self._uncounted.cost)

    def has(self, cost: Cost, kept: float) -> bool:
        """Whether there is room for it beside a part of everything that is kept; when in doubt, there is not."""
        report, total, uncounted = self._report, self._total, self._uncounted
        return (
            cost.slots + 1 + kept * total.slots <= report.slots - uncounted.slots
            and cost.blocks + 1 + kept * total.blocks <= report.blocks - uncounted.blocks
        )

    @property
    def overcommit_slots(self) -> int:
        """Slots beyond the free ones for guests. `free` may be below zero, and then they are taken as much."""
        return self._overcommit_slots

    @property
    def overcommits(self) -> bool:
        """Whether the replica makes room for tenants that hold few places, so that none need be kept for them."""
        return self._overcommits

    @property
    def total(self) -> Cost:
        """Capacity of the replica, free or not."""
        return self._total

    @property
    def uncounted(self) -> Cost:
        """Cost that was dispatched and is in no report yet."""
        return self._uncounted.cost

    @property
    def unanswered_tokens(self) -> int:
        """Prompt tokens that were dispatched and are not answered, in a report or not."""
        return self._unanswered_tokens

    @property
    def outstanding(self) -> Cost:
        """Cost of all that was dispatched and has not left."""
        return self._outstanding.cost

    @property
    def idle(self) -> bool:
        """Whether nothing at all runs or waits there, as far as one can know."""
        return not self._busy and not self.held

    def on_report(self, load: LoadReport, unheard: int, max_sequences: int) -> None:
        """Takes a load report, new or the same as before.

        Args:
            load: The report.
            unheard: Submissions that it does not contain.
            max_sequences: What the replica can run at most.
        """
        while len(self._sent) > unheard:
            hold, cost = self._sent.popleft()
            self._count(hold, cost)
        if load is self._reported:
            return
        self._reported = load
        # An engine may take fewer for a while than it could, for the sake of the time between tokens.
        taken_now = load.running - load.guests + load.waiting + load.free_sequences
        self._total = Cost(min(max_sequences, max(1, taken_now)), load.total_blocks - load.pinned_blocks)
        self._report = Cost(load.free_sequences, load.free_blocks - load.promised_blocks)
        self._overcommit_slots = load.guest_places
        self._overcommits = self._overcommits or load.guests + load.guest_places > 0
        self._busy = load.running + load.waiting > 0

    def estimate(self, slots: int) -> None:
        """There is no report that could be gone by: the replica has so many places, less what was released to it."""
        if self._sent:
            self._sent.clear()
        left = slots - self._outstanding.slots + self._uncounted.slots
        if self._reported is None and self._total.slots == slots and self._report.slots == left:
            return  # as it was estimated before
        self._reported = None
        self._total = Cost(slots, PLENTY)
        self._report = Cost(left, PLENTY)
        self._overcommit_slots = 0
        self._busy = False

    def acquire(self, costs: Sequence[Cost]) -> CreditHold:
        """Takes what a request needs, one cost for each prompt in the order in which they will be submitted."""
        hold = CreditHold(costs)
        self.held += 1
        self._unanswered_tokens += hold.unanswered_tokens
        self._outstanding.add(hold.cost)
        self._uncounted.add(hold.cost)
        return hold

    def on_submitted(self, hold: CreditHold) -> None:
        """The next prompt of it was sent to the engine."""
        if hold._unsent:
            self._sent.append((hold, hold._unsent.popleft()))

    def on_answered(self, hold: CreditHold) -> None:
        """A token of it came, so the engine counts what was sent of it, whether or not we were told of the sending."""
        self._unanswered_tokens -= hold.unanswered_tokens
        hold.unanswered_tokens = 0
        while hold._unsent:
            self._count(hold, hold._unsent.popleft())

    def release(self, hold: CreditHold) -> None:
        """Releases the credits of a request. A second time changes nothing."""
        if hold._left:
            return
        hold._left = True
        self.held -= 1
        # Its prompts are no longer to be computed, as far as one knows from here.
        self._unanswered_tokens -= hold.unanswered_tokens
        hold.unanswered_tokens = 0
        self._outstanding.subtract(hold.cost)
        if hold.uncounted is not NOTHING:
            self._uncounted.subtract(hold.uncounted)
            hold.uncounted = NOTHING

    def _count(self, hold: CreditHold, cost: Cost) -> None:
        """The engine counts it from now on."""
        if not hold._left:
            hold.uncounted = NOTHING if cost is hold.uncounted else hold.uncounted.minus(cost)
            self._uncounted.subtract(cost)


def total_cost(costs: Sequence[Cost]) -> Cost:
    """Returns the sum of several costs."""
    if len(costs) == 1:
        return costs[0]
    return Cost(
        sum(cost.slots for cost in costs),
        sum(cost.blocks for cost in costs),
        sum(cost.prompt_tokens for cost in costs),
    )
