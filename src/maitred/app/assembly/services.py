"""The parts of a gateway that stay when its configuration changes, and how they are told."""

from dataclasses import dataclass

from maitred.admission.admission import Admission
from maitred.admission.policy.retries import RetryBudget
from maitred.api.in_flight import InFlightLimiter
from maitred.app.admin.sleep import SleepableModelAdmin
from maitred.app.admin.store_health import StoreHealth
from maitred.app.ground import GatewayResources
from maitred.app.live import LiveState
from maitred.app.models.registry import EngineRegistry
from maitred.app.pins import PinAdmin
from maitred.app.queues import Queues
from maitred.app.reload import Reloader
from maitred.app.replicas import ReplicaAdmin
from maitred.app.rollouts import RolloutAdmin
from maitred.app.trials import RolloutObserver
from maitred.app.workers.admin import WorkerAdmin
from maitred.app.workers.controller import ControllerServer
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.config.tree import Config
from maitred.console.sessions import ConsoleSessions
from maitred.core.clock import Clock
from maitred.core.tenancy import ANONYMOUS
from maitred.observe.logs import set_up
from maitred.observe.metrics import Metrics
from maitred.observe.observer_batch import ObserverBatch
from maitred.observe.recent import RecentTraffic
from maitred.observe.timelines import TimelineBuffer
from maitred.routing.rollout.live import LiveRollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServices:
    """All of them. Each has a method `adopt` for the settings that it goes by; none of these can fail.

    Attributes:
        ground: What the gateway stands on.
        clock: The time.
        roster: What engines of ours serve.
        gate: Who is inside.
        admission: What is reserved and owed; each regime has one of its own prices, see `Admission.as_now`.
        queues: Who waits, and who runs where.
        retry_budget: Who may come back.
        live, rollouts, trials: New versions that are tried.
        digest: Tells who counts requests.
        metrics, stories, recent, live_state: Who watches.
        accounts: How the stores are.
        replicas, sleepers, pins: What operators can tell.
        answers: Kept for repeats.
        sessions: Of the console.
        reloader: Changes the configuration.
        desk: Where API workers ask, if there are any.
        staff: These, as operators see them.
    """

    ground: GatewayResources
    clock: Clock
    roster: EngineRegistry
    gate: InFlightLimiter
    admission: Admission
    queues: Queues
    retry_budget: RetryBudget
    live: LiveRollouts
    rollouts: RolloutAdmin
    trials: RolloutObserver
    digest: ObserverBatch
    metrics: Metrics
    stories: TimelineBuffer
    recent: RecentTraffic
    live_state: LiveState
    accounts: StoreHealth
    replicas: ReplicaAdmin
    sleepers: SleepableModelAdmin
    pins: PinAdmin
    answers: MemoryIdempotencyStore
    sessions: ConsoleSessions
    reloader: Reloader
    desk: ControllerServer
    staff: WorkerAdmin

    def adopt(self, before: Config, config: Config) -> None:
        """They go by these settings from now on; queues, upstreams and rollouts are told with the regime."""
        server, identity = config.server, config.identity
        access = self.ground.access
        if config.log != before.log:
            set_up(config.log)
        self.gate.adopt(server.max_in_flight)
        self.retry_budget.adopt(server.retry_share, server.retry_allowance)
        for engine in self.roster.engines.values():
            engine.link.unread_tokens = server.unread_tokens
        access.refresher.adopt(identity.refresh_s, identity.max_stale_s)
        access.identity.adopt(ANONYMOUS if server.serves_anyone else None)
        self.admission.adopt(config.admission)
        self.ground.grammars.adopt(config.admission.grammars)
        self.answers.adopt(config.idempotency)
        self.stories.adopt(config.explain.requests)
        self.metrics.adopt(config.metrics, config.slos)
        self.sessions.adopt(config.console.session_s, config.console.sessions)
        self.live_state.pulse.adopt(config.console.viewers)
