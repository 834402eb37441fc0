"""The standing of a server of somebody else's, for a worker: the controller alone decides whether it gets requests."""

from maitred.app.workers.far_seat import HERE
from maitred.replica.health.breaker import Attempt, Outcome
from maitred.replica.upstream.standing import Standing
from maitred.wire.desk import Met

_MET = {Outcome.SUCCESS: Met.SUCCESS, Outcome.FAILURE: Met.FAILURE, Outcome.NEITHER: Met.NEITHER}


class FarStanding(Standing):
    """Lets everything through, and notes at the request's seat what it has met."""

    def check(self) -> None:
        """See `Standing.check`: whoever was released to it may go."""

    def begin(self) -> Attempt:
        """See `Standing.begin`."""
        return Attempt(0, probe=False, begun_s=0.0)

    def answered(self, attempt: Attempt) -> None:
        """See `Standing.answered`: the seat hears of the first token."""

    def ended(self, attempt: Attempt, outcome: Outcome) -> None:
        """See `Standing.ended`."""
        self._note(_MET[outcome])

    def missed(self, reason: str) -> None:
        """See `Standing.missed`."""
        self.reason = reason
        self._note(Met.AWAY)

    def _note(self, met: Met) -> None:
        seat = HERE.get()
        if seat is not None and seat.met is not Met.AWAY:
            seat.met = met
