"""The standing of a server of somebody else's, for a worker: the controller alone decides whether it gets requests."""

from maitred.app.workers.far_seat import CURRENT_DISPATCH
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt
from maitred.replica.upstream.status import UpstreamStatus
from maitred.wire.worker_protocol import AttemptResult

_MET = {
    AttemptOutcome.SUCCESS: AttemptResult.SUCCESS,
    AttemptOutcome.FAILURE: AttemptResult.FAILURE,
    AttemptOutcome.NEITHER: AttemptResult.NEITHER,
}


class RemoteUpstreamStatus(UpstreamStatus):
    """Lets everything through, and notes at the request's seat what it has met."""

    def check(self) -> None:
        """See `UpstreamStatus.check`: whoever was released to it may go."""

    def begin(self) -> BreakerAttempt:
        """See `UpstreamStatus.begin`."""
        return BreakerAttempt(0, probe=False, begun_s=0.0)

    def answered(self, attempt: BreakerAttempt) -> None:
        """See `UpstreamStatus.answered`: the seat hears of the first token."""

    def ended(self, attempt: BreakerAttempt, outcome: AttemptOutcome) -> None:
        """See `UpstreamStatus.ended`."""
        self._note(_MET[outcome])

    def missed(self, reason: str) -> None:
        """See `UpstreamStatus.missed`."""
        self.reason = reason
        self._note(AttemptResult.AWAY)

    def _note(self, met: AttemptResult) -> None:
        seat = CURRENT_DISPATCH.get()
        if seat is not None and seat.met is not AttemptResult.AWAY:
            seat.met = met
