"""The fair line of one room, set up to be played through (see `policy.race`)."""

from collections.abc import Collection, Sequence
from itertools import islice

from maitred.core.flow import FlowLevel
from maitred.dispatch.capacity import CapacityAllocator
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.entry import QueuedRequest
from maitred.dispatch.policy.simulation import (
    MOST_AHEAD,
    MOST_TENANTS,
    ArrivalRates,
    PredictedTurn,
    SimulatedTenant,
    until_turn,
)
from maitred.dispatch.pool_queue import PoolQueue
from maitred.dispatch.predictor import LatencyPredictor, RunningWork
from maitred.fairness.entry import WorkAhead
from maitred.fairness.vtc import PATIENCE_S


def playable(room: PoolQueue, ticket: QueuedRequest, ahead: WorkAhead) -> bool:
    """Whether it pays to play a line through, and can be done: few tenants wait, of one class, and not for long."""
    return (
        ahead.entries <= MOST_AHEAD
        and len(room.tenants) < MOST_TENANTS
        and len(room) == room.waiting_in(ticket.flow.priority)
    )


class QueueSimulation:
    """Who waits in a room and may still come, as of one moment.

    Args:
        room: The room.
        joins: Who sends how often.
        outlook: How long answers are.
        allotment: Who has which places.
        ready: The replicas.
        steps_per_s: Of these.
        now_s: Now.
    """

    def __init__(
        self,
        room: PoolQueue,
        joins: ArrivalRates,
        outlook: LatencyPredictor,
        allotment: CapacityAllocator,
        ready: Sequence[EndpointState],
        steps_per_s: float,
        now_s: float,
    ) -> None:
        self._room = room
        self._outlook = outlook
        self._allotment = allotment
        self._guests = allotment.guests_of(room.quota, ready)
        self._index: dict[str, int] = {}
        self._runners: list[SimulatedTenant] = []
        self._played: dict[tuple[str, int, int], PredictedTurn] = {}
        for tickets in room.tenants.values():
            first = next(iter(tickets))
            self._add(first, tickets, joins.per_s(first.tenant.id, now_s) / steps_per_s)
        self._level = min((runner.counter for runner in self._runners), default=0.0)
        for tenant, flow in joins:
            if len(self._runners) == MOST_TENANTS:
                break
            if tenant not in self._index and (rate := joins.per_s(tenant, now_s)) > 0.0:
                self._index[tenant] = len(self._runners)
                lead = max(self._level, room.line.over_service(flow))
                steps = outlook.steps_of(outlook.typical_service)
                self._append(flow.path[0], lead, 0, steps, rate / steps_per_s)

    def turn(self, ticket: QueuedRequest, at_work: RunningWork, free: int, output: float) -> PredictedTurn:
        """When a request is released.

        Args:
            ticket: It waits here, or might.
            at_work: What runs.
            free: Places that it may use.
            output: Service of a token of an answer.
        """
        tenant = ticket.tenant.id
        due_s = due_of(ticket)
        before = sum(due_of(other) <= due_s for other in self._room.tenants.get(tenant, ()) if other is not ticket)
        known = self._played.get((tenant, before, free))
        if known is not None:
            return known
        if tenant not in self._index:
            self._add(ticket, (), 0.0)
            mine = self._runners[-1]
            mine.counter = max(mine.counter, self._level)
        turns = [
            until_turn(
                self._runners,
                self._index[tenant],
                before,
                [(steps, self._index.get(whose, -1)) for steps, whose in way],
                free,
                output,
                self._guests,
            )
            for way in at_work.ways
        ]
        played = self._played[tenant, before, free] = PredictedTurn(
            *(sum(each) / len(turns) for each in zip(*turns, strict=True))
        )
        return played

    def _add(self, ticket: QueuedRequest, waiting: Collection[QueuedRequest], joins_per_step: float) -> None:
        tenant, outlook = ticket.tenant, self._outlook
        self._index[tenant.id] = len(self._runners)
        lead = self._room.line.over_service(ticket.flow)
        next_ones = sorted(islice(waiting, MOST_AHEAD), key=due_of)
        prompts = [outlook.prompt_service_of(one) for one in next_ones]
        self._append(tenant, lead, len(waiting), outlook.steps(ticket), joins_per_step, prompts)

    def _append(
        self,
        tenant: FlowLevel,
        lead: float,
        waiting: int,
        steps: float,
        joins_per_step: float,
        prompts: Sequence[float] = (),
    ) -> None:
        self._runners.append(
            SimulatedTenant(
                lead,
                tenant.weight,
                waiting,
                self._outlook.prompt_service,
                steps,
                joins_per_step,
                self._allotment.holdings.held_by(tenant),
                prompts,
            )
        )


def due_of(ticket: QueuedRequest) -> float:
    """What orders the requests of one key."""
    return ticket.arrived_s + PATIENCE_S if ticket.first_token_by_s is None else ticket.first_token_by_s
