"""Who is in the queue of one model and at its replicas, tenant by tenant: for people who watch, not for decisions."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from maitred.dispatch.core import DispatchCore


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
