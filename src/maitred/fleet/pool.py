"""Replica pool: the replicas of one model, which come and go at run time until there are as many as desired.

::

    desired, backend's replicas, requests --reconcile--> orders --> backend, engines, admin states
                       ^                                                       |
                       `------------------- changes ---------------------------'

Where other gateways send requests to the same replicas, all of them drain one that is to go, and it ends when nobody
has requests there. Where they may start and stop the replicas of the backend, too, each order of theirs changes what is
desired here by one: the last order holds, and no gateway undoes that of another.

The pool holds no plan: after each change it compares again. What dispatch sees are its endpoints. A replica that drains
stays among them until its last request has ended, and gets no new one.

An operator can put all replicas to sleep. Then the desired numbers stay, and hold again as soon as a request waits.

As soon as somebody sets the desired numbers, requests wait in the queue while no replica serves, and are told the time
until then; where no replica is meant to serve, an endpoint stands for the one that is to come. Until somebody does, the
pool keeps the replicas that it has, and does nothing for requests, steps and reports.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from functools import partial
from types import TracebackType

from msgspec.structs import replace

from maitred.core.clock import Clock
from maitred.core.errors import ModelLoading, ReplicaUnavailable
from maitred.dispatch.request import AnyEndpoint, Endpoint
from maitred.fleet.backend import BackendFacts, BackendReplica, ManagedEngine, ReplicaBackend
from maitred.fleet.policy.reconciler import (
    DesiredReplicas,
    OrderKind,
    PoolLimits,
    ReplicaOrder,
    reconcile,
)
from maitred.fleet.pool_member import NEXT_REPLICA, NextReplica, PoolMember
from maitred.fleet.sleepable_replica import SleepableReplica
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus
from maitred.scaling.startup_times import StartKind, StartupTimes, remaining_s

_PROMISED_QUANTILE = 0.9
"""Share of the starts that are over within the time that callers are told."""
_LOOK_S = 0.5
"""Time between two looks at replicas that wait for the requests of other gateways, or for decisions."""
_COUNTED_S = 10.0
"""Longest time in which no replica is stopped that was started elsewhere and has just been heard of: the last decision
did not count it."""
_COMING = "A replica of the model is being started, and requests wait for it. Try again after the time in Retry-After."
_log = logging.getLogger(__name__)


class ReplicaPool:
    """Replicas of one model. Entering opens the backend and starts the first replicas; leaving closes it.

    Args:
        backend: Starts and stops the replicas.
        desired: The desired numbers at first. Those that the backend has kept come before them, and so does the number
            of the replicas that it has already.
        startup_times: Durations of starts; the pool adds each complete start.
        clock: The clock.
        refusal: Returns what callers are told while no replica serves; None: the time until one does.

    Attributes:
        desired: The desired numbers.
        startup_times: Durations of starts by kind.
        engines: Engines by replica. The mapping object is always the same.
        is_scaled: Whether somebody sets the desired numbers, here or in an earlier gateway.
        rests: Whether all replicas are to sleep until `wake`, because an operator has put the model to sleep.
        past_output_tokens: Output tokens of the engines that are gone.
        pause_at_tokens: Number of unread tokens at which a stream pauses its engine; None: the default.
        region: Region of the replicas that it starts and stops; it leaves those of other regions alone.
    """

    def __init__(
        self,
        backend: ReplicaBackend,
        desired: DesiredReplicas,
        startup_times: StartupTimes,
        clock: Clock,
        refusal: Callable[[], ReplicaUnavailable] | None = None,
    ) -> None:
        self.backend = backend
        self.desired = desired
        self.startup_times = startup_times
        self.engines: dict[str, ManagedEngine] = {}
        self.is_scaled = self.rests = False
        self.past_output_tokens = 0
        self._is_set = False
        """Whether the desired numbers were set here, and no other gateway has decided since."""
        self.pause_at_tokens: int | None = None
        self.region: str | None = None
        self._clock = clock
        self._members: dict[str, PoolMember] = {}
        self._change_listeners: list[Callable[[], None]] = []
        self._endpoint_listeners: list[Callable[[], None]] = []
        self._engine_listeners: list[Callable[[str, ManagedEngine], None]] = []
        self._started_s: dict[str, float] = {}
        """When the start of each replica was ordered that is no member yet."""
        self._found: set[str] = set()
        """Replicas that the backend had before, until their engines have told whether they sleep."""
        self._heard_s: dict[str, float] = {}
        """Replicas that nobody here has started, with the time at which they were heard of, for `_COUNTED_S`."""
        self._stopping: set[str] = set()
        """Replicas that have left the pool and are stopped in this reconciliation."""
        self._reconcile_scheduled = self._is_open = False
        self._look: asyncio.TimerHandle | None = None
        """Look at replicas that wait for the requests of other gateways, or for decisions; None: none does."""
        self._has_served = False
        """Whether a replica has served, or none was to."""
        self._refusal = refusal or (lambda: ModelLoading(_COMING, retry_after_s=self.ready_in_s()))
        self._next_endpoint: AnyEndpoint = Endpoint(NEXT_REPLICA, NextReplica(self._refusal))
        self._endpoints = [self._next_endpoint]
        backend.on_change(self._schedule)

    async def __aenter__(self) -> "ReplicaPool":
        await self.backend.__aenter__()
        self._is_open = True
        replicas = self.backend.replicas()
        self._found = {name for name, replica in replicas.items() if replica.phase is not ReplicaPhase.DRAINING}
        self.is_scaled = self._has_served = self.backend.desired is not None
        self._update_members()  # those that are there are nobody's order
        self._heard_s.clear()  # they are counted below
        if self.backend.desired is not None:
            self.desired = self.backend.desired
        elif self._found:
            self.desired = DesiredReplicas(len(self._found))
        elif not replicas and self.backend.facts.can_scale and not self.backend.facts.follows:
            for number in range(self.desired.serving):
                self._start(self.backend.name_of(number))
        self._reconcile()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if self._look is not None:
            self._look.cancel()
        await self.backend.__aexit__(kind, error, trace)

    async def wait_started(self) -> None:
        """Waits until one replica has been ready.

        Raises:
            ReplicaUnavailable: No replica can start; the message gives the reason.
        """
        await self.backend.wait_started()

    # --- what is desired ---

    def set_desired(self, serving: int, asleep: int = 0, *, counted_s: float = math.inf) -> None:
        """Sets the desired numbers; replicas are started, woken, drained, put to sleep and stopped from now on.

        Args:
            serving: Replicas that serve.
            asleep: Replicas that sleep, beyond those; none if the backend's engines cannot sleep.
            counted_s: Time at which the replicas were counted for this decision.
        """
        self._heard_s = {name: heard_s for name, heard_s in self._heard_s.items() if heard_s > counted_s}
        desired = DesiredReplicas(serving, asleep)
        if desired != self.desired:
            _log.info("%d replicas are to serve and %d to sleep.", serving, asleep)
        self.desired, self._is_set = desired, True
        self.backend.keep_desired(desired)
        self._has_served = self._has_served or not serving
        self.let_requests_wait()
        self._reconcile()
        for listener in self._change_listeners:
            listener()

    def let_requests_wait(self) -> None:
        """Lets requests wait from now on while no replica serves, because somebody sets the desired numbers."""
        self.is_scaled = True
        for member in self._members.values():
            if member.endpoint is not None:
                member.endpoint.replica.refusal = self._refusal
        self._update_endpoints()

    def rest(self) -> None:
        """Puts all replicas to sleep once their requests have ended, until `wake`. The desired numbers stay."""
        self._set_rests(rests=True)

    def wake(self) -> None:
        """Lets the replicas serve that `rest`, or another gateway of the same engines, has put to sleep."""
        for member in self._members.values():
            if member.endpoint is not None and not member.is_reserved and member.endpoint.replica.client.is_asleep:
                self._watch_load(member)
                member.endpoint.replica.wake()
        self._set_rests(rests=False)

    def _set_rests(self, *, rests: bool) -> None:
        if rests is not self.rests:
            self.rests = rests
            if self.backend.facts.follows and not rests:
                for name in [
                    member.name
                    for member in self._members.values()
                    if member.is_reserved and not member.backend.is_reserved
                ]:
                    self._obey(ReplicaOrder(OrderKind.WAKE, name))
            self._reconcile()
            for listener in self._change_listeners:
                listener()

    def refresh(self) -> None:
        """Compares again after an operator has given a replica an order."""
        self._schedule()

    def reconfigure(self, pause_at_tokens: int) -> None:
        """Sets the number of unread tokens at which a stream pauses its engine, for new streams."""
        self.pause_at_tokens = pause_at_tokens
        for engine in self.engines.values():
            engine.client.pause_at_tokens = pause_at_tokens

    # --- what there is ---

    def replicas(self) -> list[ReplicaStatus]:
        """Returns the status of each replica that is not being stopped; times are on the monotonic clock."""
        now_s = self._clock.monotonic_s()
        return [
            ReplicaStatus(
                name=member.name,
                phase=member.phase,
                since_s=member.since_s,
                ready_in_s=self._remaining_s(member, now_s),
                start_kind=member.start_kind,
                is_own=self.is_own(member.name),
            )
            for member in self._members.values()
        ]

    def is_own(self, name: str) -> bool:
        """Whether a replica counts for the desired numbers: its engine tells no other region than the pool's."""
        member = self._members.get(name)
        return member is None or member.region is None or member.region == self.region

    @property
    def is_ready(self) -> bool:
        """Whether any of the engines would take a request now."""
        return any(engine.client.is_ready for engine in self.engines.values())

    @property
    def stays_ready(self) -> bool:
        """Whether the model is ready for requests while no replica serves, since they bring one.

        Not before the first replica of a new gateway has served: requests may wait for it, but a load balancer has
        others to send them to.
        """
        return self.is_scaled and self._has_served

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all engines, those that are gone included."""
        return self.past_output_tokens + sum(engine.client.output_tokens for engine in self.engines.values())

    @property
    def _replaces(self) -> bool:
        """Whether another replica can take the place of one in maintenance."""
        return self.is_scaled and self.backend.facts.max_replicas > 1

    def endpoints(self) -> list[AnyEndpoint]:
        """Returns the endpoints for dispatch; at least one, which lets requests wait if none serves."""
        return list(self._endpoints)

    def ready_in_s(self) -> float:
        """Returns the seconds until a replica should serve: of the first that is on its way, or of one that would be.

        Nine of ten starts so far took no longer.
        """
        now_s = self._clock.monotonic_s()
        members = self._members.values()
        coming = [seconds for member in members if (seconds := self._remaining_s(member, now_s)) is not None]
        if coming:
            return min(coming)
        asleep = [
            self._expected_s(StartKind.ASLEEP, member)
            for member in members
            if member.phase is ReplicaPhase.ASLEEP or (self.rests and member.is_leaving)
        ]
        return min(asleep) if asleep else self._expected_s(self.backend.facts.start_kind)

    def _expected_s(self, kind: StartKind, member: PoolMember | None = None) -> float:
        """Returns the seconds of a start; those of the first waking are what the engine expects itself."""
        if kind is StartKind.ASLEEP and not self.startup_times.count(kind) and member is not None and member.client:
            return member.client.wakes_in_s
        return self.startup_times.quantile(kind, _PROMISED_QUANTILE)

    def _remaining_s(self, member: PoolMember, now_s: float) -> float | None:
        """Returns the seconds until a replica serves that starts or wakes; None: it does neither."""
        if member.phase not in (ReplicaPhase.STARTING, ReplicaPhase.WAKING):
            return None
        since_s = member.since_s if member.ordered_s is None else member.ordered_s
        return remaining_s(self._expected_s(member.start_kind, member), now_s - since_s)

    # --- listeners ---

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of the phase of a replica or of the desired numbers."""
        self._change_listeners.append(listener)

    def on_endpoints(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of `endpoints`; a removed replica is stopped after that."""
        self._endpoint_listeners.append(listener)

    def on_engine(self, listener: Callable[[str, ManagedEngine], None]) -> None:
        """Calls `listener` with the name and the engine of each replica, now and when one comes."""
        self._engine_listeners.append(listener)
        for name, engine in self.engines.items():
            listener(name, engine)

    # --- reconciliation ---

    def _schedule(self) -> None:
        """Schedules one reconciliation after the changes of this turn of the event loop."""
        if not self._reconcile_scheduled and self._is_open:
            self._reconcile_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._reconcile_scheduled = False
        if self._is_open:
            self._reconcile()

    def _reconcile(self) -> None:
        """Brings the pool up to date, and gives the orders that are due."""
        facts = self.backend.facts
        changed = self._update_members()
        self._follow_backend(facts)
        now_s = self._clock.monotonic_s()
        orders = self._due_orders(facts, now_s)
        for order in orders:
            self._obey(order)
        if not facts.follows:
            # Those that sleep are not to go: a request at any gateway wakes them.
            leaving = [member.name for member in self._members.values() if member.is_leaving and not self.rests]
            self.backend.keep_leaving([*leaving, *self._stopping])
            if not self.rests:
                self.backend.keep_asleep([member.name for member in self._members.values() if member.is_reserved])
        changed = self._update_members() or changed
        self._update_endpoints()
        for order in orders:
            if order.kind is OrderKind.STOP:
                self.backend.stop(order.name)
                self._stopping.discard(order.name)
        if self._look is None and (
            self._heard_s
            or any(member.is_leaving and self._must_wait(member, now_s) for member in self._members.values())
        ):
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)
        if changed or orders:
            self._schedule()  # an order may make the next one due
            for listener in self._change_listeners:
                listener()

    def _follow_backend(self, facts: BackendFacts) -> None:
        """Takes over what others decide: how many replicas there are to be, and which of them go."""
        if not facts.can_scale:
            self.desired = DesiredReplicas(sum(map(self.is_own, self._members)))  # whatever was desired before
        if facts.follows:
            self._is_set = False
        if not (self.rests if facts.follows else self._is_set):
            self._follow_others()
        for member in self._members.values():
            if (facts.follows and not self.rests) or not self.is_own(member.name):
                self._follow_leaving(member)
                self._follow_reserved(member)

    def _due_orders(self, facts: BackendFacts, now_s: float) -> list[ReplicaOrder]:
        """Returns the orders that are due to the replicas as they are now."""
        going = sum(
            name not in self._members and replica.region in (None, self.region)
            for name, replica in self.backend.replicas().items()
        )
        limits = PoolLimits(
            max_replicas=facts.max_replicas - going,
            max_starts=facts.max_starts,
            can_sleep=facts.can_sleep or self.rests,
        )
        self._heard_s = {
            name: heard_s
            for name, heard_s in self._heard_s.items()
            if (heard := self._members.get(name)) is not None
            and not heard.backend.is_leaving  # whoever lets it go has counted it
            and now_s - heard_s < _COUNTED_S
        }
        own = [
            member.state(must_wait=self._must_wait(member, now_s))
            for member in self._members.values()
            if self.is_own(member.name)
        ]
        orders = [] if facts.follows and not self.rests else reconcile(self._desired_now(), own, limits)
        if facts.follows:  # to sleep is an order to engines, which any gateway may give
            orders = [order for order in orders if order.kind not in (OrderKind.START, OrderKind.STOP)]
        if facts.puts_to_sleep and not self.rests:  # a request of another gateway would wake it at once
            orders = [
                order
                for order in orders
                if order.kind is not OrderKind.SLEEP or not self._must_wait(self._members[order.name], now_s)
            ]
        ending = (OrderKind.DRAIN, OrderKind.STOP)
        return [order for order in orders if order.kind not in ending or order.name not in self._heard_s]

    def _must_wait(self, member: PoolMember, now_s: float) -> bool:
        """Whether a replica may not end yet for the sake of other gateways; a shared backend sees to that itself."""
        return not self.backend.facts.is_shared and member.must_wait(now_s)

    def _look_again(self) -> None:
        self._look = None
        self._run_scheduled()

    def _desired_now(self) -> DesiredReplicas:
        """Returns the desired numbers; none of what was found leaves before it is known which of them sleep."""
        self._found = {
            name
            for name in self._found
            if (member := self._members.get(name)) is not None and member.phase is ReplicaPhase.STARTING
        }
        if self.rests:
            return DesiredReplicas(0, self.desired.serving + self.desired.asleep)
        return DesiredReplicas(max(self.desired.serving, len(self._members))) if self._found else self.desired

    def _obey(self, order: ReplicaOrder) -> None:
        """Carries out an order; a replica that is to stop only leaves the pool."""
        if order.kind is OrderKind.START:
            names = map(self.backend.name_of, itertools.count())
            self._start(next(name for name in names if name not in self.backend.replicas()))
            return
        _log.info("Replica %s: %s.", order.name, order.kind.value)
        member, now_s = self._members[order.name], self._clock.monotonic_s()
        match order.kind:
            case OrderKind.DRAIN:
                self._drain(member)
            case OrderKind.SERVE:
                self._serve(member, now_s)
            case OrderKind.SLEEP:
                assert member.endpoint is not None
                self._reserve(member)
            case OrderKind.WAKE:
                assert member.endpoint is not None
                if member.phase is ReplicaPhase.ASLEEP:
                    member.start_kind, member.ordered_s = StartKind.ASLEEP, now_s
                member.endpoint.replica.release()
                self._serve(member, now_s)
            case OrderKind.STOP:
                self._remove(member)
                self._stopping.add(member.name)

    def _start(self, name: str) -> None:
        self._started_s[name] = self._clock.monotonic_s()
        self.backend.start(name)

    def _drain(self, member: PoolMember) -> None:
        if member.endpoint is not None and not member.is_leaving:
            member.was_serving = member.endpoint.admin_state.serving
        if not member.is_leaving:
            member.leaving_since_s = self._clock.monotonic_s()
        member.is_leaving = True
        if member.endpoint is not None:
            member.endpoint.admin_state.on_idle = self._schedule
            member.endpoint.admin_state.drain()

    def _serve(self, member: PoolMember, now_s: float) -> None:
        member.is_leaving = False
        if member.endpoint is not None and member.was_serving:
            member.endpoint.admin_state.serve(now_s)

    def _reserve(self, member: PoolMember) -> None:
        """Has a replica sleep; where others use it, too, its owner puts it to sleep, and tells them all."""
        assert member.endpoint is not None
        self._watch_load(member)
        member.endpoint.replica.reserve(tells_engine=self.rests or not self.backend.facts.puts_to_sleep)

    def _watch_load(self, member: PoolMember) -> None:
        if not member.watches_load and member.endpoint is not None:
            member.watches_load = True
            member.endpoint.replica.client.on_change(partial(self._on_report, member))

    def _on_report(self, member: PoolMember) -> None:
        """Handles a report of a replica that was told to sleep or to wake once."""
        assert member.endpoint is not None
        member.endpoint.replica.on_report()
        client = member.endpoint.replica.client
        if self.rests and member.phase is ReplicaPhase.ASLEEP and client.is_ready and not client.is_asleep:
            asyncio.get_running_loop().call_soon(self.wake)  # another gateway has woken it
        if member.current_phase(is_replaced=self._replaces) is not member.phase:
            self._schedule()

    # --- members ---

    def _update_members(self) -> bool:
        """Brings the members up to date with the backend; returns whether one or its phase has changed."""
        changed = False
        replicas = self.backend.replicas()
        for name, known in replicas.items():
            if known.ordered_as and name not in self._members:
                self._rename(known.ordered_as, name)
        for member in list(self._members.values()):
            if (replica := replicas.get(member.name)) is None or replica.phase is ReplicaPhase.DRAINING:
                self._remove(member)  # somebody else stops it
                self._follow(0 if member.is_leaving else -1)
                changed = True
        for name, replica in replicas.items():
            if replica.phase is ReplicaPhase.DRAINING or name in self._stopping:
                continue
            if name not in self._members:
                ordered_s = self._started_s.pop(name, None)
                self._members[name] = PoolMember(replica, ordered_s)
                self._follow(int(ordered_s is None and not replica.is_leaving))
                if ordered_s is None and self.backend.facts.outlives_gateway and not self.backend.facts.is_shared:
                    self._heard_s[name] = self._clock.monotonic_s()
                if replica.is_leaving:
                    self._drain(self._members[name])  # another gateway has begun it
                changed = self._update_member(self._members[name], replica)
                self._follow_reserved(self._members[name])
                changed = True
            changed = self._update_member(self._members[name], replica) or changed
        return changed

    def _rename(self, before: str, name: str) -> None:
        """Gives a replica that was ordered here its own name, which its backend knows now."""
        if (ordered_s := self._started_s.pop(before, None)) is not None:
            self._started_s[name] = ordered_s
        if (member := self._members.pop(before, None)) is not None:
            member.name = name
            self._members[name] = member

    def _follow_others(self) -> None:
        """Takes over what another gateway desires, or has desired before this one, as late agents may tell."""
        if self.backend.desired is not None:
            self.desired, self._has_served = self.backend.desired, True
            if not self.is_scaled:
                self.let_requests_wait()

    def _follow_leaving(self, member: PoolMember) -> None:
        """Drains a replica that another gateway lets go, or lets it serve again; what this one has ordered is over."""
        if member.backend.is_leaving and not member.is_leaving:
            self._drain(member)
        elif member.is_leaving and not member.backend.is_leaving:
            self._serve(member, self._clock.monotonic_s())

    def _follow_reserved(self, member: PoolMember) -> None:
        """Takes over whether a replica sleeps beside those that serve, as another gateway has ordered."""
        is_reserved = member.backend.is_reserved
        if member.endpoint is not None and is_reserved is not member.is_reserved:
            self._watch_load(member)
            member.endpoint.replica.follow(is_reserved=is_reserved)

    def _follow(self, change: int) -> None:
        """Follows the order of another gateway, which has started or stopped a replica."""
        if change and self.backend.facts.is_shared:
            self.desired = replace(self.desired, serving=max(0, self.desired.serving + change))

    def _update_member(self, member: PoolMember, replica: BackendReplica) -> bool:
        self._has_served = self._has_served or replica.phase is ReplicaPhase.SERVING
        is_back = replica.phase is ReplicaPhase.SERVING and member.backend.phase is not ReplicaPhase.SERVING
        member.backend = replica
        if member.endpoint is None and (engine := replica.engine) is not None:
            member.endpoint = Endpoint(
                member.name,
                SleepableReplica(engine.client),
                region=replica.region,
                round_trip_s=engine.client.round_trip_s,
            )
            if self.is_scaled:
                member.endpoint.replica.refusal = self._refusal
            if member.is_leaving:
                self._drain(member)
            self.engines[member.name] = engine
            if self.pause_at_tokens is not None:
                engine.client.pause_at_tokens = self.pause_at_tokens
            for listener in self._engine_listeners:
                listener(member.name, engine)
        if is_back and member.endpoint is not None and member.is_reserved:
            self._reserve(member)  # an engine that has been started again is awake
        if member.is_leaving and member.endpoint is not None:
            member.endpoint.admin_state.drain()  # an operator may have let it serve again
        before, member.phase = member.phase, member.current_phase(is_replaced=self._replaces)
        if member.phase is before:
            return False
        now_s = self._clock.monotonic_s()
        member.since_s = now_s
        if member.phase is ReplicaPhase.STARTING:
            member.start_kind = replica.start_kind
        elif member.phase is ReplicaPhase.FAILED:
            member.ordered_s = None  # what comes now is not a start as it should be
        elif member.phase is ReplicaPhase.SERVING and member.ordered_s is not None:
            self.startup_times.observe(member.start_kind, now_s - member.ordered_s)
            member.ordered_s = None
        return True

    def _remove(self, member: PoolMember) -> None:
        del self._members[member.name]
        if (engine := self.engines.pop(member.name, None)) is not None:
            self.past_output_tokens += engine.client.output_tokens

    def _update_endpoints(self) -> None:
        """Brings the endpoints up to date, and tells the listeners if they have changed."""
        members = self._members.values()
        endpoints: list[AnyEndpoint] = [member.endpoint for member in members if member.endpoint is not None]
        # The first outage is what callers are told, and a replica that leaves would say that it is out of service.
        serves = any(member.phase is ReplicaPhase.SERVING for member in members)
        refuses = (self.is_scaled or self.rests) and not serves and not all(member.takes_requests for member in members)
        if not endpoints or refuses:
            endpoints.insert(0, self._next_endpoint)
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            for listener in self._endpoint_listeners:
                listener()
