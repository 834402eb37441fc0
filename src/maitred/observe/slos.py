"""Service level objectives: good and total counts, and the rest of the error budget.

Each objective is a pair of counters, as the Site Reliability Workbook has it (Google, 2018, chapter 5): the ratio of
their rates over any span is the share that went well, and `deploy/prometheus` has the alerts. The remaining budget is
computed here as well, for installations without Prometheus: over the window, or since the start if that is shorter.

What counts for an objective:

- ``availability``: requests that were answered to their end (good); those that failed, or were rejected for lack of
  capacity, of a replica or of a store (bad). Requests that are invalid, exceed their callers' own limits, or were
  cancelled by their callers do not count.
- ``ttft``: requests by the time to their first token. A request that ended without a token is bad if that time was
  over, so that callers who cancel early do not make the service look fast.
- ``itl``: deliveries of tokens by the time since the one before.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.clock import Clock
from maitred.core.context import Outcome, RequestContext
from maitred.observe.config import SloConfig

_ANY = "*"
_WINDOW_SLICES = 240
"""Number of slices of a window, which leave it one by one; in a window of 30 days, three hours each."""
_LABELS = ("slo", "model", "class", "indicator")


class Objective:
    """Counts of one objective.

    Args:
        config: The objective.

    Attributes:
        good, total: Counts since the start.
    """

    def __init__(self, config: SloConfig) -> None:
        self.config = config
        self.good = self.total = 0
        self._slice_s = config.window_days * 86_400 / _WINDOW_SLICES
        self._slices: deque[tuple[int, int, int]] = deque([(0, 0, 0)])
        """Number of the slice, with `good` and `total` at its beginning; the oldest first.

        Slices without events are left out: their counts were those of the next one.
        """

    def count(self, context: RequestContext, now_s: float) -> None:
        """Counts an ended request, if the objective applies to it."""
        slo = self.config
        if not context.model or slo.model not in (None, context.model) or slo.priority not in (None, context.priority):
            return
        good, total = _count_good(context, slo)
        if total:
            self._advance(now_s)
            self.good += good
            self.total += total

    def budget_left(self, now_s: float) -> float:
        """Returns the part of the error budget that is left: 1 is all of it; below 0 the objective is missed."""
        self._advance(now_s)
        _, good, total = self._slices[0]
        counted = self.total - total
        if counted == 0:
            return 1.0
        bad = counted - (self.good - good)
        return 1.0 - bad / (counted * (1.0 - self.config.objective))

    def _advance(self, now_s: float) -> None:
        """Begins a slice when its time has come, and drops those that have left the window."""
        current = int(now_s / self._slice_s)
        if current > self._slices[-1][0]:
            self._slices.append((current, self.good, self.total))
        while self._slices[0][0] < current - _WINDOW_SLICES:
            self._slices.popleft()


class SloMetrics(Collector):
    """Metrics of all objectives. Implements `maitred.core.context.RequestObserver`.

    Args:
        slos: Objectives by name.
        clock: Clock for the windows.
    """

    def __init__(self, slos: Mapping[str, SloConfig], clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.monotonic_s()
        self._objectives = {name: Objective(slo) for name, slo in slos.items()}

    def reconfigure(self, slos: Mapping[str, SloConfig]) -> None:
        """Replaces the objectives; one that has changed starts with new counts."""
        previous = self._objectives
        self._objectives = {
            name: previous[name] if name in previous and previous[name].config == slo else Objective(slo)
            for name, slo in slos.items()
        }

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Counts ended requests for all objectives."""
        now_s = self._clock.monotonic_s() - self._start_s
        for objective in self._objectives.values():
            for context in contexts:
                objective.count(context, now_s)

    def collect(self) -> Iterable[Metric]:
        """Collects the objectives for Prometheus."""
        now_s = self._clock.monotonic_s() - self._start_s
        good = CounterMetricFamily("maitred_slo_good", "What went well.", labels=_LABELS)
        total = CounterMetricFamily("maitred_slo_events", "What went well or not.", labels=_LABELS)
        objective = GaugeMetricFamily("maitred_slo_objective", "The share that is to go well.", labels=_LABELS)
        within = GaugeMetricFamily("maitred_slo_within_seconds", "The longest time that is well.", labels=_LABELS)
        window = GaugeMetricFamily("maitred_slo_window_seconds", "Over which the budget is reckoned.", labels=_LABELS)
        left = GaugeMetricFamily(
            "maitred_slo_error_budget_left", "Part of the error budget that is left, by this gateway.", labels=_LABELS
        )
        for name, slo_objective in self._objectives.items():
            slo = slo_objective.config
            labels = (name, slo.model or _ANY, slo.priority or _ANY, slo.indicator)
            good.add_metric(labels, slo_objective.good)
            total.add_metric(labels, slo_objective.total)
            objective.add_metric(labels, slo.objective)
            window.add_metric(labels, slo.window_days * 86_400)
            left.add_metric(labels, slo_objective.budget_left(now_s))
            if slo.within_s is not None:
                within.add_metric(labels, slo.within_s)
        return good, total, objective, within, window, left


def _count_good(context: RequestContext, slo: SloConfig) -> tuple[int, int]:
    """Returns how many events of a request went well, and how many count."""
    within_s = math.inf if slo.within_s is None else slo.within_s
    match slo.indicator:
        case "availability":
            return _count_available(context)
        case "ttft":
            if context.first_token_s is not None:
                return int(context.first_token_s - context.started_s <= within_s), 1
            return 0, int(context.ended_s - context.started_s > within_s)
        case "itl":
            return sum(gap_s <= within_s for gap_s in context.gaps_s), len(context.gaps_s)


def _count_available(context: RequestContext) -> tuple[int, int]:
    match context.outcome:
        case Outcome.FINISHED:
            return 1, 1
        case Outcome.CANCELLED:
            return 0, 0
        case Outcome.REFUSED | Outcome.FAILED | None:
            is_client_fault = 400 <= context.status < 500 and (context.status != 429 or bool(context.refused_by))
            return 0, int(not is_client_fault)
