"""The fair line of one room, set up to be played through (see `policy.race`)."""

from maitred.dispatch.outlook import Left, Outlook
from maitred.dispatch.policy.race import MOST_AHEAD, MOST_TENANTS, Joins, Runner, steps_until_turn
from maitred.dispatch.room import Room
from maitred.dispatch.ticket import Ticket
from maitred.fairness.entry import Ahead
from maitred.fairness.fair import PATIENCE_S


def playable(room: Room, ticket: Ticket, ahead: Ahead) -> bool:
    """Whether it pays to play a line through, and can be done: few tenants wait, of one class, and not for long."""
    return (
        ahead.entries <= MOST_AHEAD
        and len(room.tenants) < MOST_TENANTS
        and len(room) == room.waiting_in(ticket.flow.priority)
    )


class Contest:
    """Who waits in a room and may still come, as of one moment.

    Args:
        room: The room.
        joins: Who sends how often.
        outlook: How long answers are.
        steps_per_s: Of the replicas.
        now_s: Now.
    """

    def __init__(self, room: Room, joins: Joins, outlook: Outlook, steps_per_s: float, now_s: float) -> None:
        self._room = room
        self._outlook = outlook
        self._index: dict[str, int] = {}
        self._runners: list[Runner] = []
        self._played: dict[tuple[str, int, int], float] = {}
        for tickets in room.tenants.values():
            first = next(iter(tickets))
            self._add(first, len(tickets), joins.per_s(first.tenant.id, now_s) / steps_per_s)
        self._level = min((runner.counter for runner in self._runners), default=0.0)
        for tenant, flow in joins:
            if len(self._runners) == MOST_TENANTS:
                break
            if tenant not in self._index and (rate := joins.per_s(tenant, now_s)) > 0.0:
                self._index[tenant] = len(self._runners)
                lead = max(self._level, room.line.over_service(flow))
                steps = outlook.steps_of(outlook.typical_service)
                self._runners.append(
                    Runner(lead, flow.path[0].weight, 0, outlook.prompt_service, steps, rate / steps_per_s)
                )

    def steps(self, ticket: Ticket, left: Left, free: int, output: float) -> float:
        """Steps until a request is released.

        Args:
            ticket: It waits here, or might.
            left: Of the running answers.
            free: Places that it may use.
            output: Service of a token of an answer.
        """
        tenant = ticket.tenant.id
        due_s = _due_s(ticket)
        before = sum(_due_s(other) <= due_s for other in self._room.tenants.get(tenant, ()) if other is not ticket)
        known = self._played.get((tenant, before, free))
        if known is not None:
            return known
        if tenant not in self._index:
            self._add(ticket, 0, 0.0)
            mine = self._runners[-1]
            mine.counter = max(mine.counter, self._level)
        steps = [
            steps_until_turn(
                self._runners,
                self._index[tenant],
                before,
                [(steps, self._index.get(whose, -1)) for steps, whose in way],
                free,
                output,
            )
            for way in left
        ]
        played = self._played[tenant, before, free] = sum(steps) / len(steps)
        return played

    def _add(self, ticket: Ticket, waiting: int, joins_per_step: float) -> None:
        share = ticket.tenant
        self._index[share.id] = len(self._runners)
        self._runners.append(
            Runner(
                self._room.line.over_service(ticket.flow),
                share.weight,
                waiting,
                self._outlook.prompt_service,
                self._outlook.steps(ticket),
                joins_per_step,
            )
        )


def _due_s(ticket: Ticket) -> float:
    """What orders the requests of one key."""
    return ticket.arrived_s + PATIENCE_S if ticket.first_token_by_s is None else ticket.first_token_by_s
