"""A fleet that exists on paper: a backend whose replicas start, serve, sleep and die when a test says so."""

import asyncio

from msgspec.structs import replace

from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import LoadReport
from maitred.fleet.backend import BackendFacts, BackendReplica
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind
from maitred.testing.script import SCRIPTED_CARD
from maitred.wire.address import parse_address


class PaperClient:
    """Client of an engine that exists on paper."""

    def __init__(self):
        self.address = parse_address("unix:/nowhere")
        self.is_ready = self.is_rejected = False
        self.report = LoadReport()
        self.output_tokens = 0
        self.model_s = 0.0
        self.pause_at_tokens = self.open_streams = 0
        self.orders = []
        self.on_idle = lambda: None
        self.listeners = []
        self.count_unreported = lambda: 0
        self.generate = None

    @property
    def is_asleep(self):
        return self.is_ready and self.report.asleep

    @property
    def wakes_in_s(self):
        return 0.5

    def card(self):
        if not self.is_ready:
            raise ReplicaUnavailable
        return SCRIPTED_CARD

    def round_trip_s(self):
        return None

    def load(self):
        return self.report

    def on_change(self, listener):
        self.listeners.append(listener)

    def request_asleep(self, *, asleep):
        self.orders.append(asleep)

    def end_stream(self):
        self.open_streams -= 1
        if not self.open_streams:
            self.on_idle()

    def tell(self, **report):
        self.report = LoadReport(**report)
        for listener in self.listeners:
            listener()


class PaperEngine:
    """Engine that exists on paper."""

    def __init__(self):
        self.client = PaperClient()


class PaperBackend:
    """Backend whose replicas do what a test says. Implements `ReplicaBackend`."""

    def __init__(self, clock, *, found=(), desired=None, serves_others=False, **facts):
        self.facts = BackendFacts(
            **{"max_replicas": 8, "max_starts": 8, "start_kind": StartKind.WEIGHTS_CACHED, "can_sleep": True, **facts}
        )
        self.desired = self.kept = desired
        self.leaving = set()
        self.asleep = set()
        self._serves_others = serves_others
        self.there = {}
        self._clock = clock
        self._listeners = []
        for name in found:
            self.start(name)
            self.become(name, ReplicaPhase.SERVING)

    def replicas(self):
        return self.there

    def name_of(self, number):
        return f"r{number}"

    def on_change(self, listener):
        self._listeners.append(listener)

    def keep_desired(self, desired):
        self.kept = desired

    def keep_leaving(self, names):
        self.leaving = set(names)

    def keep_asleep(self, names):
        self.asleep = set(names)

    def start(self, name):
        self.there[name] = BackendReplica(
            name=name,
            phase=ReplicaPhase.STARTING,
            since_s=self._clock.monotonic_s(),
            engine=PaperEngine(),
            start_kind=self.facts.start_kind,
        )
        self._notify()

    def stop(self, name):
        self.become(name, ReplicaPhase.DRAINING)

    def become(self, name, phase):
        replica = self.there[name]
        replica.engine.client.is_ready = phase is ReplicaPhase.SERVING
        self.there[name] = BackendReplica(
            name=name,
            phase=phase,
            since_s=self._clock.monotonic_s(),
            engine=replica.engine,
            start_kind=replica.start_kind,
            failure="it died" if phase is ReplicaPhase.FAILED else "",
            serves_others=self._serves_others,
        )
        self._notify()

    def tell_leaving(self, *names):
        """Another gateway lets these go, and no others."""
        for name, replica in self.there.items():
            self.there[name] = replace(replica, is_leaving=name in names)
        self._notify()

    def tell_reserved(self, *names):
        """Another gateway has these sleep, and no others."""
        for name, replica in self.there.items():
            self.there[name] = replace(replica, is_reserved=name in names)
        self._notify()

    def lead(self, *, follows=False):
        self.facts = replace(self.facts, follows=follows)
        self._notify()

    def vanish(self, name):
        del self.there[name]
        self._notify()

    def _notify(self):
        for listener in self._listeners:
            listener()

    async def wait_started(self):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass


class PaperConnection(PaperEngine):
    """Connection to an engine that exists on paper."""

    failure_reason = ""

    def __init__(self):
        super().__init__()
        self.on_transition = lambda: None
        self.is_open = False

    @property
    def phase(self):
        if self.failure_reason:
            return ReplicaPhase.FAILED
        return ReplicaPhase.SERVING if self.client.is_ready else ReplicaPhase.STARTING

    async def wait_started(self):
        await asyncio.Event().wait()

    async def __aenter__(self):
        self.is_open = True
        return self

    async def __aexit__(self, *error):
        self.is_open = False

    def connect(self):
        self.client.is_ready = True
        self.on_transition()

    def fail(self, reason, *, is_rejected=False):
        self.client.is_ready, self.client.is_rejected, self.failure_reason = False, is_rejected, reason
        self.on_transition()
