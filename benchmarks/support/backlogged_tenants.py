"""Tenants of different weights, all of whom have requests waiting all the time."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.single_request import Client
from benchmarks.support.tenant_gateway import settled
from benchmarks.support.traffic import Length, Sort, of, play_closed
from maitred.core.flow import ServiceWeights
from maitred.testing.server_process import ServerProcess

WEIGHTS = {"one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0}
FORMS: dict[str, tuple[Length, Length]] = {
    "one": ((20, 60), (60, 140)),
    "two": ((200, 400), (10, 30)),
    "three": ((60, 140), (30, 70)),
    "four": ((10, 30), (100, 200)),
}
SERVICE = ServiceWeights()


async def backlog(
    server: ServerProcess, client: Client, keys: Mapping[str, str], slots: int, seconds: float
) -> dict[str, Any]:
    """What each of these tenants was served over its weight, and how even that is.

    Args:
        server: Whose tenants have `WEIGHTS`.
        client: Of the same.
        keys: By tenant.
        slots: Sequences at once.
        seconds: How long; the first fifth is not counted.
    """
    users = {Sort(name, keys[name], *FORMS[name]): 2 * slots for name in WEIGHTS}
    await settled(server)
    visits = await play_closed(client, users, seconds=seconds, seed="backlog")
    from_s = seconds / 5
    normalised = {}
    for name, weight in WEIGHTS.items():
        service = sum(
            SERVICE.service(visit.prompt_tokens * (from_s <= visit.first_s < seconds), 0, 0)
            + SERVICE.output * visit.tokens_within(from_s, seconds)
            for visit in of(visits, name)
        )
        normalised[name] = round(service / weight, 1)
    return {"service_over_weight": normalised, "jain": round(jain(list(normalised.values())), 4)}


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are alike, 1 over their number when one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values)) if any(values) else 0.0
