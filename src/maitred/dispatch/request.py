"""Requests as dispatch sees them, and endpoints where they can run."""

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
    """One request on its way to a replica."""

    id: str
    """The request id that the client knows; clients may repeat it."""
    principal_org: str
    """Who may ask for its place by its id."""
    flow: Flow
    prompt_tokens: int
    """Of all prompts."""
    prompts: Sequence[Sequence[int]]
    """Each is submitted as a request of its own, in this order. Where tokens are estimated, what stands for them."""
    max_tokens: int
    """Per choice."""
    choices: int
    """Of all prompts together."""
    arrived_s: float
    """Monotonic, as all times here."""
    deadline_s: float | None = None
    """When its first token must be there; None: by the default of its class, if there is one."""
    movable: bool = False
    """Whether it can be sent to another model while it waits (see `DispatchEntry.wait_dispatched`)."""
    session: str | None = None
    """Requests of one session are served at one replica, where that can be; no two organisations have one in common."""
    timeline: RequestTimeline = msgspec.field(default_factory=RequestTimeline)
    """Where it is noted how it fared."""


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[R]):
    """A replica under the name that the ledger has for it."""

    name: str
    replica: R
    exact: bool = True
    """Whether its load reports say what it has left. For others a window is learnt from their time to first token."""
    admin_state: AdminState = field(default_factory=AdminState, compare=False)
    """Whether it is to be given anything, and what it has been given."""
    external_load: Callable[[float], ExternalLoad] | None = field(default=None, compare=False)
    """Where its load reports do not say it: what it has to do for others, at a monotonic time. None: nobody knows."""


AnyEndpoint = Endpoint[Any]
"""Dispatch chooses between posts; only who sends something there knows how it is done."""
