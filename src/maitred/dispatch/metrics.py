"""Snapshots of one model's queue for metrics and for the console."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.policy.credits import PLENTY
from maitred.dispatch.queue import QUEUE_BUCKETS_S, WaitHistogram
from maitred.dispatch.request import DispatchRequest

_PROBE_FLOW_PATH = (FlowLevel("*"),)
_QUANTILES = {"0.1": 0.1, "0.5": 0.5, "0.9": 0.9}


@dataclass(frozen=True, slots=True)
class CreditGauge:
    """Free and total credits of one resource (slots or KV tokens) of one replica."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DispatchSnapshot:
    """State of one queue at a scrape; `maitred.observe.metrics.dispatch.DispatchState` describes the fields."""

    waiting: Mapping[str, int]
    predicted_wait_s: Mapping[str, float]
    queue_bounds_s: Sequence[float]
    queue_s: Mapping[tuple[str, str], WaitHistogram]
    running: int
    outstanding_tokens: int
    credits: Mapping[tuple[str, str], CreditGauge]
    trust: Mapping[str, float]
    refusals: Mapping[str, int]
    left_waiting: int
    moved: int
    region: str
    spills: Mapping[tuple[str, str], int]
    round_trip_s: Mapping[str, float]
    wasted_tokens: int
    service_per_s: float
    predictions: int
    ttft_ratio: Mapping[str, float]
    ttft_error: Mapping[str, float]


def dispatch_snapshot(core: DispatchCore, now_s: float) -> DispatchSnapshot:
    """Returns a snapshot of one model's queue."""
    ready = core.refresh(now_s)
    predictor, counters = core.predictor, core.counters
    waiting: dict[str, int] = {}
    predicted: dict[str, float] = {}
    for priority in PriorityClass:
        waiting[priority.value] = sum(queue.waiting_in(priority) for queue in core.queues)
        probe_entry = core.new_entry(
            DispatchRequest(
                id="",
                organisation="",
                flow=Flow(_PROBE_FLOW_PATH, priority),
                prompt_tokens=1,
                prompts=[[0]],
                max_tokens=1,
                choices=1,
                arrived_s=now_s,
            )
        )
        predicted[priority.value] = core.forecast_cache.position(
            core.forecast_cache.forecast(probe_entry, ready, now_s), now_s
        ).wait_s
    credits_left: dict[tuple[str, str], CreditGauge] = {}
    for endpoint_state in core.endpoint_states:
        name, free, total = endpoint_state.endpoint.name, endpoint_state.free, endpoint_state.total
        credits_left[name, "slots"] = CreditGauge(free.slots, total.slots)
        if total.blocks < PLENTY:
            size = endpoint_state.block_tokens
            credits_left[name, "kv_tokens"] = CreditGauge(free.blocks * size, total.blocks * size)
    return DispatchSnapshot(
        waiting=waiting,
        predicted_wait_s=predicted,
        queue_bounds_s=QUEUE_BUCKETS_S,
        queue_s=counters.queue_s,
        running=core.running,
        outstanding_tokens=sum(
            endpoint_state.credits.outstanding.blocks * endpoint_state.block_tokens
            for endpoint_state in core.endpoint_states
        ),
        credits=credits_left,
        trust={
            endpoint_state.endpoint.name: core.load_estimator.trust(endpoint_state, now_s)
            for endpoint_state in ready
            if endpoint_state.endpoint.reports_capacity or endpoint_state.endpoint.external_load is not None
        },
        refusals=counters.rejections,
        left_waiting=counters.left_waiting,
        moved=counters.moved,
        region=core.region or "",
        spills={(region, reason.value): count for (region, reason), count in counters.spills.items()},
        round_trip_s={
            endpoint_state.endpoint.name: seconds
            for endpoint_state in ready
            if (measured := endpoint_state.endpoint.round_trip_s) is not None and (seconds := measured()) is not None
        },
        wasted_tokens=counters.wasted_tokens,
        service_per_s=predictor.per_s(ready) or 0.0,
        predictions=predictor.calibration.compared,
        ttft_ratio={name: predictor.calibration.ratio(share) for name, share in _QUANTILES.items()},
        ttft_error={name: predictor.calibration.error(share) for name, share in _QUANTILES.items()},
    )


@dataclass(frozen=True, slots=True)
class TenantActivity:
    """Number of requests by organisation and phase."""

    waiting: Mapping[str, int]
    prefilling: Mapping[str, int]
    """Dispatched requests that have produced no token."""
    decoding: Mapping[str, int]
    kv_tokens: Mapping[str, Mapping[str, int]]
    """Replica -> organisation -> KV tokens that its requests hold as credits."""


def tenant_activity(core: DispatchCore) -> TenantActivity:
    """Returns the activity of all organisations; cost is linear in tenants and running requests."""
    waiting, prefilling, decoding = Counter[str](), Counter[str](), Counter[str]()
    kv_tokens: dict[str, Counter[str]] = {
        endpoint_state.endpoint.name: Counter() for endpoint_state in core.endpoint_states
    }
    for queue in core.queues:
        for tenant, entries in queue.tenants.items():
            waiting[tenant] += len(entries)
    for queued in core.running_requests:
        tenant = queued.tenant.id
        (decoding if queued.has_output else prefilling)[tenant] += 1
        if (allocation := queued.allocation) is not None:
            kv_tokens[allocation.endpoint_state.endpoint.name][tenant] += (
                allocation.hold.cost.blocks * allocation.endpoint_state.block_tokens
            )
    return TenantActivity(waiting, prefilling, decoding, kv_tokens)
