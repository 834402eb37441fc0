"""Requests and endpoints of dispatch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from maitred.core.flow import Flow
from maitred.core.replica import AdminState, ExternalLoad, ReplicaBase
from maitred.core.timeline import RequestTimeline

R = TypeVar("R", bound=ReplicaBase, covariant=True)


class DispatchRequest(Struct, frozen=True):
    """One request that dispatch should send to a replica."""

    id: str
    """The request id that the client knows; clients may repeat it."""
    organisation: str
    """Organisation of the caller, which may ask for the queue position by request id."""
    flow: Flow
    prompt_tokens: int
    """Prompt tokens of all prompts together."""
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt; each prompt is submitted separately, in this order. If tokens are only estimated,
    placeholders of that number."""
    max_tokens: int
    """Maximum output tokens of each choice."""
    choices: int
    """Number of choices of all prompts together."""
    arrived_s: float
    """Arrival time, in monotonic seconds."""
    ttft_deadline_s: float | None = None
    """Deadline of the first token; None: the default of its class, if any."""
    movable: bool = False
    """Whether the request may move to another model while it waits (see `DispatchEntry.wait_dispatched`)."""
    session: str | None = None
    """Requests of one session go to the same replica if possible; a session belongs to one organisation."""
    regions: frozenset[str] | None = None
    """Regions in which the request may be computed; None: in all regions."""
    timeline: RequestTimeline = msgspec.field(default_factory=RequestTimeline)
    """Timeline in which the events of the request are recorded."""


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[R]):
    """A replica with its unique name."""

    name: str
    replica: R
    reports_capacity: bool = True
    """Whether its load reports state its free capacity. For other replicas a concurrency window is learnt from times to
    first token."""
    admin_state: AdminState = field(default_factory=AdminState, compare=False)
    """Administrative state of the replica, and its number of running requests."""
    external_load: Callable[[float], ExternalLoad] | None = field(default=None, compare=False)
    """Returns the load from other clients at a monotonic time, for replicas whose reports lack it. None: unknown."""
    region: str | None = None
    """Region of the replica if its card tells none; None: no named region."""
    round_trip_s: Callable[[], float | None] | None = field(default=None, compare=False)
    """Returns the measured round-trip time to the replica in seconds; None: it is not measured."""


AnyEndpoint = Endpoint[Any]
"""Dispatch only selects endpoints, so it does not depend on the type of the replica client."""
