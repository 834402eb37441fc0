"""Traffic of the last minutes, second by second, for live views without a metrics store.

Everything here is bounded: ten minutes of points, the last kinds of rejections, and the tenants that were active last.
Times are kept as counts in buckets 15 % wide, which is as exact as a chart shows. A point's percentiles are those of
the last ten seconds, so that a quiet server draws a line and not a cloud. Rejections for the same reason are one entry
with a count: otherwise a flood of one tenant would hide those of all others.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add, sub

from maitred.core.clock import Clock
from maitred.core.context import CacheStatus, Outcome, RequestContext
from maitred.observe.observer_batch import ObserverBatch
from maitred.wire.admin.cache import CacheUseBody
from maitred.wire.admin.live import PointBody, RefusalBody

MAX_POINTS = 600
"""Seconds that are kept."""
_MAX_REJECTIONS = 50
_MAX_TENANTS = 500
"""Most tenants whose traffic is known; the one that was active longest ago is forgotten first."""
_PERCENTILE_WINDOW_S = 10
"""Seconds that the percentiles of a point cover."""
_MAX_GAPS = 64
"""Most times between tokens that are sampled of one request, spread over its response."""
_BOUNDS_S = tuple(0.001 * 1.15**step for step in range(86))
"""Upper bounds of the buckets, up to 2.4 minutes."""
_MEDIAN, _TAIL = 0.5, 0.95


@dataclass(slots=True)
class TenantTraffic:
    """Traffic of one tenant since the gateway started, or since the tenant was forgotten."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Second:
    ended: dict[Outcome, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0


class RecentTraffic:
    """Recent traffic by second and by tenant. Implements `maitred.core.context.RequestObserver`.

    Args:
        clock: Clock for the times of points and rejections.

    Attributes:
        batch: Batch that ended requests go to. It has no other observer: it is delivered every second, which would be
            too often for observers that are read once a scrape.
        points: The seconds, oldest first.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.batch = ObserverBatch(self)
        self.points: deque[PointBody] = deque(maxlen=MAX_POINTS)
        self._rejections: dict[tuple[str, str, str, str], RefusalBody] = {}
        self._tenants: dict[str, TenantTraffic] = {}
        self._lookups: dict[CacheStatus, int] = {}
        self._saved_tokens = 0
        self._current = _Second()
        self._ttft, self._itl = _PercentileWindow(), _PercentileWindow()

    @property
    def rejections(self) -> dict[tuple[str, str, str, str], RefusalBody]:
        """Last rejections by tenant, model, code and limit; the newest last."""
        self.batch.flush_pending()
        return self._rejections

    @property
    def tenants(self) -> dict[str, TenantTraffic]:
        """Traffic of every recently active tenant, teams included in their organisation; the most recent last."""
        self.batch.flush_pending()
        return self._tenants

    @property
    def cache_use(self) -> CacheUseBody:
        """Look-ups in the cache of answers since the start."""
        self.batch.flush_pending()
        return CacheUseBody(lookups={**self._lookups}, saved_tokens=self._saved_tokens)

    def on_first_token(self, after_s: float) -> None:
        """Records the time to first token of a request."""
        self._ttft.add((after_s,))

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Counts ended requests. Requests that ask for no model are not counted."""
        for context in contexts:
            self._count(context)

    def _count(self, context: RequestContext) -> None:
        outcome = context.outcome
        if outcome is None or not (context.model or (outcome is Outcome.REFUSED and context.route.startswith("/v1/"))):
            return
        second = self._current
        second.ended[outcome] = second.ended.get(outcome, 0) + 1
        if (cache := context.cache) is not None:
            self._lookups[cache.status] = self._lookups.get(cache.status, 0) + 1
            self._saved_tokens += context.saved_tokens
        if context.is_computed:
            second.prompt_tokens += context.prompt_tokens - context.saved_prompt_tokens
            second.output_tokens += context.completion_tokens
        gaps_s = context.gaps_s
        if gaps_s:
            self._itl.add(gaps_s[:: -(-len(gaps_s) // _MAX_GAPS)])
        self._record_tenants(context)
        if outcome in (Outcome.REFUSED, Outcome.FAILED):
            self._record_rejection(context)

    def tick(self, waiting: int, running: int) -> PointBody:
        """Closes the current second and returns its point.

        Args:
            waiting: Requests that wait now, in all queues.
            running: Requests that run now.
        """
        self.batch.flush_pending()
        second, self._current = self._current, _Second()
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

    def _record_tenants(self, context: RequestContext) -> None:
        for tenant in () if context.principal is None else context.principal.tenants:
            traffic = self._tenants.pop(tenant, None) or TenantTraffic()
            self._tenants[tenant] = traffic
            traffic.requests += 1
            traffic.rejected += context.outcome is Outcome.REFUSED
            if context.is_computed:
                traffic.prompt_tokens += context.prompt_tokens - context.saved_prompt_tokens
                traffic.output_tokens += context.completion_tokens
        while len(self._tenants) > _MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]

    def _record_rejection(self, context: RequestContext) -> None:
        failure = context.failure
        tenant = "" if context.principal is None else context.principal.tenants[-1]
        code = "" if failure is None else failure.code
        key = (tenant, context.model, code, context.refused_by)
        previous = self._rejections.pop(key, None)
        self._rejections[key] = RefusalBody(
            at=self._clock.wall_s() - self._clock.monotonic_s() + context.ended_s,
            count=1 if previous is None else previous.count + 1,
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
        if len(self._rejections) > _MAX_REJECTIONS:
            del self._rejections[next(iter(self._rejections))]


class _PercentileWindow:
    """Percentiles over the last `_PERCENTILE_WINDOW_S` seconds; values are kept as counts in buckets."""

    def __init__(self) -> None:
        self._new_times_s: list[float] = []
        self._seconds: deque[list[int] | None] = deque([None] * _PERCENTILE_WINDOW_S)
        self._sum = [0] * (len(_BOUNDS_S) + 1)

    def add(self, times_s: Iterable[float]) -> None:
        """Adds times of the current second."""
        self._new_times_s += times_s

    def tick(self) -> tuple[float, float] | None:
        """Closes the current second.

        Returns:
            Median and 95th percentile; None: there are no values.
        """
        new_counts: list[int] | None = None
        if self._new_times_s:
            # With sorted times, one search for each bound is enough for any number of times.
            times_s = sorted(self._new_times_s)
            within = [0, *map(partial(bisect_right, times_s), _BOUNDS_S), len(times_s)]
            new_counts = list(map(sub, within[1:], within))
            self._new_times_s = []
        self._seconds.append(new_counts)
        old_counts = self._seconds.popleft()
        if new_counts is not None:
            self._sum = list(map(add, self._sum, new_counts))
        if old_counts is not None:
            self._sum = list(map(sub, self._sum, old_counts))
        value_count = sum(self._sum)
        return (
            (_quantile(self._sum, value_count * _MEDIAN), _quantile(self._sum, value_count * _TAIL))
            if value_count
            else None
        )


def _quantile(counts: Sequence[int], rank: float) -> float:
    """Returns the value at a rank, as if values lay evenly in their bucket."""
    for bucket, count in enumerate(counts):
        if count and rank <= count:
            low_s = _BOUNDS_S[bucket - 1] if bucket else 0.0
            high_s = _BOUNDS_S[min(bucket, len(_BOUNDS_S) - 1)]
            return low_s + (high_s - low_s) * rank / count
        rank -= count
    return _BOUNDS_S[-1]
