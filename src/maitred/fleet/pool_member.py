"""Members of a replica pool, and what stands for the replica that is to come."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import LoadReport, ModelCard, TokenStream
from maitred.core.request import EngineRequest
from maitred.dispatch.request import Endpoint
from maitred.fleet.backend import BackendReplica
from maitred.fleet.policy.reconciler import PooledReplica
from maitred.fleet.sleepable_replica import SleepableReplica
from maitred.replica.engine.client import EngineClient
from maitred.scaling.replica_status import ReplicaPhase

HEARD_S = 2.0
"""Time from the word that a replica leaves until no gateway sends it anything any more."""
LONGEST_DRAIN_S = 600.0
"""Longest time for which a replica that leaves waits for requests of other gateways."""
NEXT_REPLICA = "next"
"""Name of the endpoint that stands for the replica that is to come."""


class NextReplica:
    """Replica that is to come: it never serves, and says when one will. Implements `maitred.core.replica.Replica`.

    Args:
        refusal: Returns what callers are told: usually `ModelLoading` with the time until a replica should serve.
    """

    weight = 1.0

    def __init__(self, refusal: Callable[[], ReplicaUnavailable]) -> None:
        self._refusal = refusal

    def card(self) -> ModelCard:
        """Returns no card: there is no replica yet. Raises ReplicaUnavailable with what callers are told."""
        raise self._refusal()

    def load(self) -> LoadReport:
        """Returns an empty report."""
        return LoadReport()

    def count_unreported(self) -> int:
        """Returns 0: it gets no request."""
        return 0

    def on_change(self, listener: Callable[[], None]) -> None:
        """Does nothing: the pool changes the endpoints when a replica serves."""

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Submits nothing: there is no replica yet. Raises ReplicaUnavailable."""
        raise self._refusal()


class PoolMember:
    """Replica of a pool.

    Attributes:
        name: Its name.
        backend: What the backend says of it.
        endpoint: Its endpoint; None until its engine is known.
        phase: Its phase with the orders of the pool.
        since_s: Time at which this phase began.
        start_kind: Kind of its last start, which may be a waking.
        ordered_s: When that start was ordered, until it is complete; None: it is, or the order is older than this pool.
        is_leaving: Whether it gets no new requests, because it is to stop or to sleep.
        leaving_since_s: Since when.
        was_serving: Whether it took requests before that; False: an operator had it in maintenance.
        watches_load: Whether its load reports are watched, because it was told to sleep or to wake once.
    """

    def __init__(self, backend: BackendReplica, ordered_s: float | None) -> None:
        self.name = backend.name
        self.backend = backend
        self.endpoint: Endpoint[SleepableReplica] | None = None
        self.phase = backend.phase
        self.since_s = backend.since_s
        self.start_kind = backend.start_kind
        self.ordered_s = ordered_s
        self.is_leaving = self.watches_load = False
        self.leaving_since_s = 0.0
        self.was_serving = True
        self._region: str | None = None

    @property
    def client(self) -> EngineClient | None:
        """Client of its engine, if that is known."""
        return None if self.endpoint is None else self.endpoint.replica.client

    @property
    def region(self) -> str | None:
        """Region that its backend or its engine has told; None: none."""
        if self.backend.region is not None:
            return self.backend.region
        if self.client is not None and self.client.is_ready:
            self._region = self.client.card().region
        return self._region

    @property
    def is_reserved(self) -> bool:
        """Whether it sleeps as a reserve, or was told to."""
        return self.endpoint is not None and self.endpoint.replica.is_reserved

    @property
    def takes_requests(self) -> bool:
        """Whether it may get new requests: it is not leaving, and no operator has it in maintenance."""
        return not self.is_leaving and (self.endpoint is None or self.endpoint.admin_state.serving)

    def current_phase(self, *, is_replaced: bool) -> ReplicaPhase:
        """Returns its phase now; one in maintenance counts as serving where no other can take its place."""
        if self.is_reserved and self.client is not None and self.client.is_asleep:
            return ReplicaPhase.ASLEEP
        if self.is_leaving:
            return ReplicaPhase.DRAINING
        if self.backend.phase is ReplicaPhase.SERVING and self.client is not None and self.client.is_asleep:
            return ReplicaPhase.WAKING
        if self.backend.phase is ReplicaPhase.SERVING and is_replaced and not self.takes_requests:
            return ReplicaPhase.MAINTENANCE
        return self.backend.phase

    @property
    def others(self) -> int:
        """Requests that other gateways have there, as its engine has told last."""
        if self.endpoint is None or not self.backend.serves_others:
            return 0
        load = self.endpoint.replica.client.load()
        return max(0, load.running + load.waiting - self.endpoint.admin_state.running)

    def must_wait(self, now_s: float) -> bool:
        """Whether it may not end yet for the sake of other gateways: they may be told, and end what they have there.

        An engine tells its load to all gateways after each step, so that of one that is connected is true. Whether it
        has anything left is unknown while it is not: then it gets the longest time.
        """
        if not self.backend.serves_others:
            return False
        leaving_s = now_s - self.leaving_since_s if self.is_leaving else 0.0
        is_connected = self.client is not None and self.client.is_ready
        return leaving_s < HEARD_S or (leaving_s < LONGEST_DRAIN_S and (self.others > 0 or not is_connected))

    def state(self, *, must_wait: bool) -> PooledReplica:
        """Returns its state for the reconciler."""
        if self.endpoint is None:
            return PooledReplica(name=self.name, phase=self.phase, is_ready=False, must_wait=must_wait)
        client, admin_state = self.endpoint.replica.client, self.endpoint.admin_state
        load = client.load()
        return PooledReplica(
            name=self.name,
            phase=ReplicaPhase.ASLEEP if self.is_reserved else self.phase,
            is_ready=client.is_ready,
            running=admin_state.running,
            others=self.others,
            must_wait=must_wait,
            cached_blocks=load.cached_blocks + load.pinned_blocks,
        )
