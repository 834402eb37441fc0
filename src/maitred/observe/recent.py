"""What happened in the last minutes, second by second: for people who watch, where a metrics store may be missing.

Everything here is bounded: ten minutes of points, the last sorts of refusals, and the tenants that were here last.
Times are kept as counts in buckets 15 % wide, which is as exact as a chart shows. A point's percentiles are those of
the last ten seconds, so that a quiet server draws a line and not a cloud. Refusals for the same reason are one entry
with a count: in a flood of one tenant, nobody else's would be seen.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from maitred.core.answer import Outcome, RequestContext
from maitred.core.clock import Clock
from maitred.observe.observer_batch import ObserverBatch
from maitred.wire.admin.live import PointBody, RefusalBody

POINTS = 600
"""Seconds that are kept."""
_REFUSALS = 50
_TENANTS = 500
"""Of which it is known what they did; the one that was here longest ago is forgotten first."""
_SPREAD_S = 10
"""What the percentiles of a point are of."""
_GAPS = 64
"""Of one request's times between tokens, so many are looked at, spread over its answer."""
_BOUNDS_S = tuple(0.001 * 1.15**step for step in range(86))
"""Up to 2.4 minutes."""
_MEDIAN, _TAIL = 0.5, 0.95


@dataclass(slots=True)
class TenantTraffic:
    """What one tenant did since the gateway started, or since it was forgotten."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Second:
    ended: dict[Outcome, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0


class RecentTraffic:
    """Implements `maitred.core.answer.RequestObserver`.

    Args:
        clock: For the time on points and refusals.
        digest: Tells it of requests; None: somebody does at once.

    Attributes:
        points: The seconds, oldest first.
    """

    def __init__(self, clock: Clock, digest: ObserverBatch | None = None) -> None:
        self._clock = clock
        self._digest = digest or ObserverBatch()
        self._digest.add_observers(self)
        self.points: deque[PointBody] = deque(maxlen=POINTS)
        self._refusals: dict[tuple[str, str, str, str], RefusalBody] = {}
        self._tenants: dict[str, TenantTraffic] = {}
        self._now = _Second()
        self._ttft, self._itl = _Spread(), _Spread()

    @property
    def refusals(self) -> dict[tuple[str, str, str, str], RefusalBody]:
        """The last ones by tenant, model, code and limit; the newest last."""
        self._digest.fold()
        return self._refusals

    @property
    def tenants(self) -> dict[str, TenantTraffic]:
        """Every tenant that was here lately, with its teams' requests among its own; the last one last."""
        self._digest.fold()
        return self._tenants

    def first_token(self, after_s: float) -> None:
        """One came, so long after its request."""
        self._ttft.add((after_s,))

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Requests ended. Those that ask for no model are not counted."""
        for context in contexts:
            self._count(context)

    def _count(self, context: RequestContext) -> None:
        outcome = context.outcome
        if outcome is None or not (context.model or (outcome is Outcome.REFUSED and context.route.startswith("/v1/"))):
            return
        second = self._now
        second.ended[outcome] = second.ended.get(outcome, 0) + 1
        second.prompt_tokens += context.prompt_tokens
        second.output_tokens += context.completion_tokens
        gaps_s = context.gaps_s
        if gaps_s:
            self._itl.add(gaps_s[:: -(-len(gaps_s) // _GAPS)])
        self._record(context)
        if outcome in (Outcome.REFUSED, Outcome.FAILED):
            self._record_refusal(context)

    def tick(self, waiting: int, running: int) -> PointBody:
        """A second is over.

        Args:
            waiting: Requests that wait now, in all queues.
            running: Requests that run now.
        """
        self._digest.fold()
        second, self._now = self._now, _Second()
        point = PointBody(
            at=self._clock.wall_s(),
            waiting=waiting,
            running=running,
            ended=second.ended,
            prompt_tokens=second.prompt_tokens,
            output_tokens=second.output_tokens,
            ttft_s=self._ttft.tick(),
            itl_s=self._itl.tick(),
        )
        self.points.append(point)
        return point

    def _record(self, context: RequestContext) -> None:
        for tenant in () if context.principal is None else context.principal.tenants:
            traffic = self._tenants.pop(tenant, None) or TenantTraffic()
            self._tenants[tenant] = traffic
            traffic.requests += 1
            traffic.refused += context.outcome is Outcome.REFUSED
            traffic.prompt_tokens += context.prompt_tokens
            traffic.output_tokens += context.completion_tokens
        while len(self._tenants) > _TENANTS:
            del self._tenants[next(iter(self._tenants))]

    def _record_refusal(self, context: RequestContext) -> None:
        failure = context.failure
        tenant = "" if context.principal is None else context.principal.tenants[-1]
        code = "" if failure is None else failure.code
        sort = (tenant, context.model, code, context.refused_by)
        before = self._refusals.pop(sort, None)
        self._refusals[sort] = RefusalBody(
            at=self._clock.wall_s() - self._clock.monotonic_s() + context.ended_s,
            count=1 if before is None else before.count + 1,
            request_id=context.request_id,
            tenant=tenant,
            model=context.model,
            route=context.route,
            status=context.status,
            code=code,
            message="" if failure is None else failure.message,
            limit=context.refused_by,
            retry_after_s=None if failure is None else failure.retry_after_s,
        )
        if len(self._refusals) > _REFUSALS:
            del self._refusals[next(iter(self._refusals))]


class _Spread:
    """Times of the last `_SPREAD_S` seconds, as counts in buckets; those of this second as they came."""

    def __init__(self) -> None:
        self._now: list[float] = []
        self._seconds: deque[list[int] | None] = deque([None] * _SPREAD_S)
        self._sum = [0] * (len(_BOUNDS_S) + 1)

    def add(self, times_s: Iterable[float]) -> None:
        """Came in this second."""
        self._now += times_s

    def tick(self) -> tuple[float, float] | None:
        """A second is over. Returns median and 95th percentile; None where nothing was added."""
        come: list[int] | None = None
        if self._now:
            # One search for each bound is enough for any number of times, if these are in order.
            times_s = sorted(self._now)
            within = [0, *(bisect_right(times_s, bound_s) for bound_s in _BOUNDS_S), len(times_s)]
            come = [more - fewer for fewer, more in pairwise(within)]
            self._now = []
        self._seconds.append(come)
        gone = self._seconds.popleft()
        for counts, sign in ((come, 1), (gone, -1)):
            if counts is not None:
                self._sum = [total + sign * count for total, count in zip(self._sum, counts, strict=True)]
        number = sum(self._sum)
        return (_quantile(self._sum, number * _MEDIAN), _quantile(self._sum, number * _TAIL)) if number else None


def _quantile(counts: Sequence[int], rank: float) -> float:
    """The time below which so many are: within its bucket, as if they lay evenly in it."""
    for bucket, count in enumerate(counts):
        if count and rank <= count:
            low_s = _BOUNDS_S[bucket - 1] if bucket else 0.0
            high_s = _BOUNDS_S[min(bucket, len(_BOUNDS_S) - 1)]
            return low_s + (high_s - low_s) * rank / count
        rank -= count
    return _BOUNDS_S[-1]
