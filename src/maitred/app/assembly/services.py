"""The parts of a gateway that stay when its configuration changes, and how they are told."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from maitred.admission.admission import Admission
from maitred.admission.grammars.validator import GrammarValidator
from maitred.admission.policy.retries import RetryBudget
from maitred.api.in_flight import InFlightLimiter
from maitred.app.admin.live import LiveState
from maitred.app.admin.pins import PinAdmin
from maitred.app.admin.replicas import ReplicaAdmin
from maitred.app.admin.rollouts import RolloutAdmin
from maitred.app.admin.sleep import SleepableModelAdmin
from maitred.app.admin.store_health import StoreHealth
from maitred.app.assembly.access import AccessServices, open_access
from maitred.app.assembly.queues import ModelQueues
from maitred.app.assembly.stores import GatewayStores, open_stores
from maitred.app.assembly.tracing import open_traces
from maitred.app.models.encoder import EncoderModels, open_encoders
from maitred.app.models.local import LocalModel, local_model
from maitred.app.models.on_demand import OnDemandModelSet, open_local_models
from maitred.app.models.registry import EngineRegistry
from maitred.app.models.upstreams import Upstreams, open_upstreams
from maitred.app.reload import Reloader
from maitred.app.request.fallback import open_schemas
from maitred.app.request.rollout_observer import RolloutObserver
from maitred.app.workers.admin import WorkerAdmin
from maitred.app.workers.controller import ControllerServer
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.config.tree import Config
from maitred.console.sessions import ConsoleSessions
from maitred.core.clock import Clock
from maitred.core.tenancy import ANONYMOUS
from maitred.fleet.engines import EngineGroup
from maitred.observe.logs import configure_logging
from maitred.observe.metrics.registry import Metrics
from maitred.observe.observer_batch import ObserverBatch
from maitred.observe.recent import RecentTraffic
from maitred.observe.timelines import TimelineBuffer
from maitred.observe.traces import TraceObserver
from maitred.routing.escalation.schemas import SchemaChecker
from maitred.routing.rollout.live import LiveRollouts
from maitred.store.orphan_journal import NOTHING_SURVIVED, SurvivingWork


@dataclass(frozen=True, slots=True)
class GatewayResources:
    """Resources that all generations share, made by `open_resources`.

    Attributes:
        traces: None: nobody traces.
        stores: Tenants, usage, counters.
        access: Who may call.
        upstreams: Servers of others.
        local: The model that is always there, on engines of ours; None: there is none.
        on_demand: Models of ours that come and go.
        encoders: For embeddings.
        schemas: Judges answers by their schemas.
        grammars: Compiles what answers have to look like.
    """

    traces: TraceObserver | None
    stores: GatewayStores
    access: AccessServices
    upstreams: Upstreams
    local: LocalModel | None
    on_demand: OnDemandModelSet
    encoders: EncoderModels
    schemas: SchemaChecker
    grammars: GrammarValidator


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServices:
    """Services of the gateway. Each has a method `reconfigure` for its settings; none of these can fail.

    Attributes:
        resources: What the gateway stands on.
        clock: The time.
        registry: What engines of ours serve.
        in_flight: Who is inside.
        admission: What is reserved and owed; each generation has one with its own prices, see `Admission.snapshot`.
        queues: Who waits, and who runs where.
        retry_budget: Who may come back.
        live, rollouts, trials: New versions that are tried.
        observer_batch: Tells who counts requests.
        metrics, timelines, recent, live_state: Observers.
        store_health: How the stores are.
        replicas, sleepers, pins: What operators can tell.
        idempotency_store: Kept for repeats.
        sessions: Of the console.
        reloader: Changes the configuration.
        controller: Where API workers ask, if there are any.
        worker_admin: These, as operators see them.
    """

    resources: GatewayResources
    clock: Clock
    registry: EngineRegistry
    in_flight: InFlightLimiter
    admission: Admission
    queues: ModelQueues
    retry_budget: RetryBudget
    live: LiveRollouts
    rollouts: RolloutAdmin
    rollout_observer: RolloutObserver
    observer_batch: ObserverBatch
    metrics: Metrics
    timelines: TimelineBuffer
    recent: RecentTraffic
    live_state: LiveState
    store_health: StoreHealth
    replica_admin: ReplicaAdmin
    sleepable_models: SleepableModelAdmin
    pin_admin: PinAdmin
    idempotency_store: MemoryIdempotencyStore
    sessions: ConsoleSessions
    reloader: Reloader
    controller: ControllerServer
    worker_admin: WorkerAdmin

    def reconfigure(self, before: Config, config: Config) -> None:
        """Applies new settings; queues, upstreams and rollouts are reconfigured with the generation."""
        server, identity = config.server, config.identity
        access = self.resources.access
        if config.log != before.log:
            configure_logging(config.log)
        self.in_flight.reconfigure(server.max_in_flight)
        self.retry_budget.reconfigure(server.retry_share, server.retry_allowance)
        for engine in self.registry.engines.values():
            engine.client.pause_at_tokens = server.unread_tokens
        access.refresher.reconfigure(identity.refresh_s, identity.max_stale_s)
        access.identity.reconfigure(ANONYMOUS if server.serves_anyone else None)
        self.admission.reconfigure(config.admission)
        self.resources.grammars.reconfigure(config.admission.grammars)
        self.idempotency_store.reconfigure(config.idempotency)
        self.timelines.reconfigure(config.explain.requests)
        self.metrics.reconfigure(config.metrics, config.slos)
        self.sessions.reconfigure(config.console.session_s, config.console.sessions)
        self.live_state.feed.reconfigure(config.console.viewers)


@asynccontextmanager
async def open_resources(
    config: Config,
    engines: EngineGroup | None,
    clock: Clock,
    show_key: Callable[[str], None],
    outlived: SurvivingWork = NOTHING_SURVIVED,
) -> AsyncIterator[GatewayResources]:
    """Opens all of it. Engines begin to start, those of the `model` section have begun, and none is waited for.

    Args:
        config: The settings.
        engines: Of the `model` section; None where only others run any model.
        clock: The time.
        show_key: Told the first key, when one had to be made.
        outlived: See `open_stores`.

    Raises:
        ConfigInvalid: No model is where the configuration says, or a setting names what cannot be used.
    """
    on_demand = open_local_models(config, clock)
    local = None if engines is None else local_model(config, engines)
    async with (
        open_traces(config.traces, clock) as traces,
        open_stores(config, clock, outlived) as stores,
        open_access(config, stores.directory, clock, show_key) as access,
        open_upstreams(config.models, config.health) as upstreams,
        open_encoders(config, local.name if local else "", clock) as encoders,
        open_schemas(config.routing.auto) as schemas,
        GrammarValidator(config.admission.grammars) as grammars,
    ):
        yield GatewayResources(traces, stores, access, upstreams, local, on_demand, encoders, schemas, grammars)
