"""A pool of replicas that exists on paper alone."""

from maitred.core.replica import StepTimes
from maitred.fleet.backend import BackendFacts, BackendReplica
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus
from maitred.scaling.startup_times import StartKind, StartupTimes

TIMES = StepTimes(fixed_s=0.02, token_s=0.0005, decode_s=0.001)


class _Backend:
    facts = BackendFacts(max_replicas=8, start_kind=StartKind.WEIGHTS_CACHED, usd_per_hour=2.0)

    def __init__(self, pool):
        self._pool = pool

    def replicas(self):
        return {
            status.name: BackendReplica(name=status.name, phase=status.phase, since_s=status.since_s)
            for status in self._pool.statuses
        }


class PaperPool:
    """Has the replicas that the test says, and remembers what is desired."""

    def __init__(self, clock):
        self.backend = _Backend(self)
        self.startup_times = StartupTimes({StartKind.WEIGHTS_CACHED: 5.0})
        self.desired = DesiredReplicas(1)
        self.orders = []
        self.statuses = [ReplicaStatus(name="replica-0", phase=ReplicaPhase.SERVING, since_s=clock.now_s - 1_000.0)]

    def set_desired(self, serving, asleep=0, *, counted_s=None):
        self.desired = DesiredReplicas(serving, asleep)
        self.orders.append((serving, asleep))

    def let_requests_wait(self):
        self.is_scaled = True

    def replicas(self):
        return self.statuses
