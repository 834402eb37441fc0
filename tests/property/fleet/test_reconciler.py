"""The reconciler leads a simulated fleet to what is desired, whatever happens on the way."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.policy.reconciler import DesiredReplicas, OrderKind, PooledReplica, PoolLimits, reconcile
from maitred.scaling.replica_status import ReplicaPhase

PHASES = [phase for phase in ReplicaPhase if phase is not ReplicaPhase.MAINTENANCE]
desires = st.builds(DesiredReplicas, st.integers(0, 5), st.integers(0, 3))
limits_of = st.builds(PoolLimits, max_replicas=st.integers(0, 8), max_starts=st.integers(1, 3), can_sleep=st.booleans())


@dataclass
class Replica:
    """A replica of the simulated fleet."""

    phase: ReplicaPhase
    is_ready: bool
    running: int = 0
    others: int = 0

    def state(self, name):
        return PooledReplica(
            name=name,
            phase=self.phase,
            is_ready=self.is_ready,
            running=self.running,
            others=self.others,
            must_wait=self.others > 0,
        )


class Fleet:
    """A fleet that carries out every order and refuses what may not be ordered."""

    def __init__(self, replicas, limits):
        self.replicas = dict(enumerate(replicas))
        self.limits = limits
        self.next = len(replicas)

    def states(self):
        return [replica.state(str(name)) for name, replica in self.replicas.items()]

    def obey(self, orders):
        for order in orders:
            if order.kind is OrderKind.START:
                self.replicas[self.next] = Replica(ReplicaPhase.STARTING, is_ready=False)
                self.next += 1
                continue
            name = int(order.name)
            replica = self.replicas[name]
            match order.kind:
                case OrderKind.SERVE:
                    assert replica.phase is ReplicaPhase.DRAINING
                    replica.phase = ReplicaPhase.SERVING if replica.is_ready else ReplicaPhase.STARTING
                case OrderKind.WAKE:
                    assert replica.phase is ReplicaPhase.ASLEEP
                    replica.phase = ReplicaPhase.WAKING if replica.is_ready else ReplicaPhase.STARTING
                case OrderKind.DRAIN:
                    assert replica.phase not in (ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP)
                    replica.phase = ReplicaPhase.DRAINING
                case OrderKind.SLEEP:
                    assert replica.phase is ReplicaPhase.DRAINING
                    assert replica.is_ready
                    assert not replica.running
                    replica.phase = ReplicaPhase.ASLEEP
                case OrderKind.STOP:
                    assert replica.phase in (ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP)
                    assert not replica.running
                    assert not replica.others or replica.phase is ReplicaPhase.ASLEEP
                    del self.replicas[name]

    def reconcile(self, desired):
        orders = reconcile(desired, self.states(), self.limits)
        self.obey(orders)
        if any(order.kind is OrderKind.START for order in orders):
            assert len(self.replicas) <= self.limits.max_replicas
            starting = [
                replica
                for replica in self.replicas.values()
                if not replica.is_ready and replica.phase is not ReplicaPhase.FAILED
            ]
            assert len(starting) <= self.limits.max_starts
        # A replica that is started to sleep drains from then on. After that, nothing is left to order at this moment.
        again = reconcile(desired, self.states(), self.limits)
        assert all(order.kind is OrderKind.DRAIN for order in again)
        self.obey(again)
        assert not reconcile(desired, self.states(), self.limits)

    def phases(self):
        return Counter(replica.phase for replica in self.replicas.values())

    def pass_time(self):
        """Everything that takes time is over: starts, wakings and requests."""
        for replica in self.replicas.values():
            if replica.phase in (ReplicaPhase.STARTING, ReplicaPhase.WAKING, ReplicaPhase.FAILED):
                replica.phase = ReplicaPhase.SERVING
            replica.is_ready = True
            if replica.phase is ReplicaPhase.DRAINING:
                replica.running = replica.others = 0


@st.composite
def replicas_of(draw):
    phase = draw(st.sampled_from(PHASES))
    is_ready = phase in (ReplicaPhase.SERVING, ReplicaPhase.WAKING) or (
        phase in (ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP) and draw(st.booleans())
    )
    may_run = is_ready and phase in (ReplicaPhase.SERVING, ReplicaPhase.DRAINING)
    requests = st.integers(0, 3)
    return Replica(phase, is_ready, *(draw(requests) if may_run else 0 for _ in range(2)))


@given(st.lists(replicas_of(), max_size=8), desires, limits_of)
def test_every_fleet_becomes_what_is_desired(replicas, desired, limits):
    fleet = Fleet(replicas, limits)
    for _ in range(20):
        fleet.reconcile(desired)
        fleet.pass_time()
    fleet.reconcile(desired)
    phases = fleet.phases()
    serving = min(desired.serving, limits.max_replicas)
    asleep = min(desired.asleep, max(0, limits.max_replicas - desired.serving)) if limits.can_sleep else 0
    if len(replicas) <= limits.max_replicas:
        assert phases == Counter({ReplicaPhase.SERVING: serving, ReplicaPhase.ASLEEP: asleep}) - Counter()
    assert phases[ReplicaPhase.SERVING] >= serving


@given(st.data(), desires, limits_of)
def test_no_order_harms_while_replicas_die_and_desires_change(data, desired, limits):
    fleet = Fleet([], limits)
    for _ in range(30):
        match data.draw(st.sampled_from(["desire", "die", "fail", "ready", "request", "other", "end", "time"])):
            case "desire":
                desired = data.draw(desires)
            case "time":
                fleet.pass_time()
            case event if fleet.replicas:
                replica = data.draw(st.sampled_from(list(fleet.replicas.values())))
                if event == "die":
                    replica.is_ready, replica.running, replica.others = False, 0, 0
                    if replica.phase in (ReplicaPhase.SERVING, ReplicaPhase.WAKING):
                        replica.phase = ReplicaPhase.FAILED
                elif event == "fail" and replica.phase is ReplicaPhase.STARTING:
                    replica.phase = ReplicaPhase.FAILED
                elif event == "ready":
                    replica.is_ready = True
                    if replica.phase in (ReplicaPhase.STARTING, ReplicaPhase.FAILED, ReplicaPhase.WAKING):
                        replica.phase = ReplicaPhase.SERVING
                elif event == "request" and replica.phase is ReplicaPhase.SERVING:
                    replica.running += 1
                elif event == "other" and replica.phase in (ReplicaPhase.SERVING, ReplicaPhase.DRAINING):
                    replica.others += 1
                elif event == "end":
                    replica.running = max(0, replica.running - 1)
            case _:
                pass
        fleet.reconcile(desired)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 5))
def test_those_with_the_fewest_requests_of_all_gateways_drain(requests, serving):
    replicas = [
        PooledReplica(name=str(name), phase=ReplicaPhase.SERVING, is_ready=True, running=own, others=others)
        for name, (own, others) in enumerate(requests)
    ]
    running = [own + others for own, others in requests]
    orders = reconcile(DesiredReplicas(serving), replicas, PoolLimits(max_replicas=9, max_starts=9, can_sleep=False))
    drained = sorted(running[int(order.name)] for order in orders if order.kind is OrderKind.DRAIN)
    assert drained == sorted(running)[: max(0, len(running) - serving)]
