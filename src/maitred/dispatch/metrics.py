"""The queue of one model as metrics show it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.counters import QUEUE_BUCKETS_S, WaitHistogram
from maitred.dispatch.policy.credits import PLENTY
from maitred.dispatch.request import DispatchRequest

_NEWCOMER = (FlowLevel("*"),)
_QUANTILES = {"0.1": 0.1, "0.5": 0.5, "0.9": 0.9}


@dataclass(frozen=True, slots=True)
class CreditGauge:
    """Of one resource of one replica."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DispatchSnapshot:
    """See `maitred.observe.metrics.dispatch.DispatchState`, which says what each field means."""

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
    wasted_tokens: int
    service_per_s: float
    predictions: int
    ttft_ratio: Mapping[str, float]
    ttft_error: Mapping[str, float]


def state_of(floor: DispatchCore, now_s: float) -> DispatchSnapshot:
    """The state of a floor now."""
    ready = floor.refresh(now_s)
    outlook, counts = floor.outlook, floor.counts
    waiting: dict[str, int] = {}
    predicted: dict[str, float] = {}
    for priority in PriorityClass:
        waiting[priority.value] = sum(room.waiting_in(priority) for room in floor.rooms)
        newcomer = floor.ticket(
            DispatchRequest(
                id="",
                principal_org="",
                flow=Flow(_NEWCOMER, priority),
                prompt_tokens=1,
                prompts=[[0]],
                max_tokens=1,
                choices=1,
                arrived_s=now_s,
            )
        )
        predicted[priority.value] = floor.place(floor.forecaster.of(newcomer, ready, now_s), now_s).wait_s
    credits_left: dict[tuple[str, str], CreditGauge] = {}
    for station in floor.stations:
        name, free, total = station.post.name, station.free, station.total
        credits_left[name, "slots"] = CreditGauge(free.slots, total.slots)
        if total.blocks < PLENTY:
            size = station.block_tokens
            credits_left[name, "kv_tokens"] = CreditGauge(free.blocks * size, total.blocks * size)
    return DispatchSnapshot(
        waiting=waiting,
        predicted_wait_s=predicted,
        queue_bounds_s=QUEUE_BUCKETS_S,
        queue_s=counts.queue_s,
        running=floor.running,
        outstanding_tokens=sum(station.credits.outstanding.blocks * station.block_tokens for station in floor.stations),
        credits=credits_left,
        trust={
            station.post.name: floor.reports.trust(station, now_s)
            for station in ready
            if station.post.exact or station.post.hearsay is not None
        },
        refusals=counts.refusals,
        left_waiting=counts.left_waiting,
        moved=counts.moved,
        wasted_tokens=counts.wasted_tokens,
        service_per_s=outlook.per_s(ready) or 0.0,
        predictions=outlook.calibration.compared,
        ttft_ratio={name: outlook.calibration.ratio(share) for name, share in _QUANTILES.items()},
        ttft_error={name: outlook.calibration.error(share) for name, share in _QUANTILES.items()},
    )


@dataclass(frozen=True, slots=True)
class TenantActivity:
    """Requests by their organisations."""

    waiting: Mapping[str, int]
    prefilling: Mapping[str, int]
    """Sent to a replica, of which nothing has come yet."""
    decoding: Mapping[str, int]
    kv_tokens: Mapping[str, Mapping[str, int]]
    """Replica -> organisation -> tokens of KV cache that its requests there were given credit for."""


def crowd_of(floor: DispatchCore) -> TenantActivity:
    """The crowd now; takes time with the tenants that wait and the requests that run."""
    waiting, prefilling, decoding = Counter[str](), Counter[str](), Counter[str]()
    kv_tokens: dict[str, Counter[str]] = {station.post.name: Counter() for station in floor.stations}
    for room in floor.rooms:
        for tenant, tickets in room.tenants.items():
            waiting[tenant] += len(tickets)
    for ticket in floor.forecaster.at_work:
        tenant = ticket.tenant.id
        (decoding if ticket.begun else prefilling)[tenant] += 1
        if (grip := ticket.grip) is not None:
            kv_tokens[grip.station.post.name][tenant] += grip.hold.cost.blocks * grip.station.block_tokens
    return TenantActivity(waiting, prefilling, decoding, kv_tokens)
