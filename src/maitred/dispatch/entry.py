"""One request in dispatch, from joining the line until it has left.

::

    waiting --released--> released --left--> gone
       |  ^                   |
       |  `---- put back -----'
       |  `--failed--> failed --left--> gone
       `--left--> gone

What it holds, and thus what has to be given back, follows from the state alone. It is put back when its replica has
failed it, which is bounded; every other arrow is passed at most once between two of these.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto

from maitred.core.balance import ReplicaCandidate
from maitred.core.errors import MaitredError
from maitred.core.queue_position import QueuePosition
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.credits import Cost, CreditHold, sum_of
from maitred.dispatch.policy.quotas import Quota
from maitred.dispatch.policy.waits import WaitMark
from maitred.dispatch.pool_queue import PoolQueue
from maitred.dispatch.request import DispatchRequest
from maitred.fairness.entry import QueueEntry
from maitred.fairness.vtc import SECONDS_PER_SERVICE


class QueueState(Enum):
    """Where a ticket is."""

    NEW = auto()
    WAITING = auto()
    RELEASED = auto()
    FAILED = auto()
    GONE = auto()


class Allocation:
    """What a released request holds."""

    __slots__ = ("begun", "hold", "quota", "since_s", "stalled_s", "station")

    def __init__(
        self, station: EndpointState, hold: CreditHold, quota: Quota, since_s: float, stalled_s: float
    ) -> None:
        self.station = station
        self.hold = hold
        self.quota = quota
        self.since_s = since_s
        self.stalled_s = stalled_s
        """Of the floor, at that time."""
        self.begun = False
        """Whether something came of it from there."""


class QueuedRequest(QueueEntry[None]):
    """See the module. It is itself what waits in the line. Its fields are written by `Floor` and its room alone."""

    __slots__ = (
        "_costs",
        "begun",
        "candidates",
        "cost",
        "costs",
        "errand",
        "expected_tokens",
        "failed_at",
        "failure",
        "first_token_by_s",
        "grip",
        "held",
        "held_at_s",
        "in_advance",
        "joined_s",
        "output_tokens",
        "owes_prompts",
        "predicted",
        "prefill_s",
        "raw_wait_s",
        "released_s",
        "returns",
        "room",
        "state",
        "tenant",
        "told_prompt_tokens",
        "waited",
        "waited_ms",
    )

    def __init__(
        self,
        errand: DispatchRequest,
        room: PoolQueue,
        costs: list[Cost],
        expected_tokens: int,
        service: float,
        first_token_by_s: float | None,
    ) -> None:
        flow = errand.flow
        super().__init__(
            None,
            flow,
            arrived_s=errand.arrived_s,
            service=service,
            # The line takes off what the whole request needs; this deadline is for its first token.
            deadline_s=None if first_token_by_s is None else first_token_by_s + SECONDS_PER_SERVICE * service,
            locality=room.locality(errand) if room.local else None,
        )
        self.errand = errand
        self.tenant = flow.path[0]
        """The organisation, with its weight."""
        self.room = room
        self._costs = costs
        self.costs = costs
        """Of the prompts that are to be submitted..."""
        self.cost = costs[0] if len(costs) == 1 else sum_of(costs)
        """...and all of them together."""
        self.expected_tokens = expected_tokens
        self.first_token_by_s = first_token_by_s
        self.state = QueueState.NEW
        self.failure: MaitredError | None = None
        self.grip: Allocation | None = None
        self.candidates: Sequence[ReplicaCandidate] = ()
        """Among which its replica was chosen; empty where there was no choice."""
        self.held: Mapping[str, int] | None = None
        """Of its prompts, by replica..."""
        self.held_at_s = 0.0
        """...when that was looked up."""
        self.waited: WaitMark | None = None
        self.waited_ms: dict[str, float] = {}
        self.joined_s = 0.0
        self.released_s = 0.0
        self.predicted: QueuePosition | None = None
        self.raw_wait_s = 0.0
        self.prefill_s = 0.0
        self.in_advance = 0.0
        self.begun = False
        self.told_prompt_tokens = 0
        self.output_tokens = 0
        self.owes_prompts = False
        """Whether all its prompts were charged, computed or not."""
        self.returns = 0
        """How often it was put back."""
        self.failed_at: set[str] = set()
        """The replicas that have failed it though they seemed ready; they are avoided while there are others."""

    def keep(self, prompts: Sequence[int]) -> None:
        """It needs places for these of its prompts only."""
        self.costs = [self._costs[number] for number in prompts]
        self.cost = sum_of(self.costs)
