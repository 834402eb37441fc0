"""Services of a gateway that stay when its configuration changes, and their reconfiguration."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from maitred.admission.admission import Admission
from maitred.admission.grammars.validator import GrammarValidator
from maitred.admission.policy.retries import RetryBudget
from maitred.api.in_flight import InFlightLimiter
from maitred.api.responses.background import BackgroundResponses
from maitred.api.responses.websocket import ResponsesWebSockets
from maitred.app.admin.cache import CacheAdmin
from maitred.app.admin.live import LiveState
from maitred.app.admin.pins import PinAdmin
from maitred.app.admin.replicas import ReplicaAdmin
from maitred.app.admin.rollouts import RolloutAdmin
from maitred.app.admin.sleep import SleepableModelAdmin
from maitred.app.admin.store_health import StoreHealth
from maitred.app.assembly.access import AccessServices, open_access
from maitred.app.assembly.opening_balance import write_opening_balances
from maitred.app.assembly.queues import ModelQueues
from maitred.app.assembly.stores import GatewayStores, open_stores
from maitred.app.assembly.tracing import open_traces
from maitred.app.models.encoder import EncoderModels, open_encoders
from maitred.app.models.local import LocalModel, local_model
from maitred.app.models.on_demand import OnDemandModelSet, open_local_models
from maitred.app.models.registry import EngineRegistry
from maitred.app.models.upstreams import Upstreams, open_upstreams
from maitred.app.reload import Reloader
from maitred.app.request.answer_sharing import AnswerSharing
from maitred.app.request.fallback import open_schemas
from maitred.app.request.rollout_observer import RolloutObserver
from maitred.app.scaling.scaler import ModelScaler
from maitred.app.workers.admin import WorkerAdmin
from maitred.app.workers.controller_server import ControllerServer
from maitred.cache.backend import MemoryBackend
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.config.tree import Config
from maitred.console.sessions import ConsoleSessions
from maitred.core.clock import Clock
from maitred.core.tenancy import ANONYMOUS
from maitred.fleet.pool import ReplicaPool
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
        traces: The trace observer; None: there is no tracing.
        stores: The stores of tenants and usage, and the counters.
        access: The services that identify and authorise callers.
        upstreams: The models of upstream servers.
        local: The resident model on the gateway's own engines; None: there is none.
        pool: The replicas of that model.
        on_demand: The own models that are loaded on demand.
        encoders: The encoder models, for embeddings.
        schemas: Validates answers against their schemas.
        grammars: Compiles the grammars of constrained answers.
    """

    traces: TraceObserver | None
    stores: GatewayStores
    access: AccessServices
    upstreams: Upstreams
    local: LocalModel | None
    pool: ReplicaPool | None
    on_demand: OnDemandModelSet
    encoders: EncoderModels
    schemas: SchemaChecker
    grammars: GrammarValidator

    async def write_opening_balances(self, config: Config, clock: Clock) -> None:
        """Writes what declared tenants have spent before, unless it is in the ledger.

        Raises:
            StoreUnavailable: The ledger cannot be read or written.
        """
        stores = self.stores
        await write_opening_balances(config.tenants, self.access.directory, stores.usage, stores.ledger, clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServices:
    """Services of the gateway that stay.

    Each service has a method `reconfigure` for its settings, and none of these methods can fail.

    Attributes:
        resources: The resources that the services use.
        clock: The clock.
        registry: The models that the gateway's own engines serve.
        in_flight: The limiter of requests in flight.
        websockets: The open WebSockets.
        admission: Reserves and settles usage against limits; each generation has a copy with its own prices, see
            `Admission.snapshot`.
        queues: The queues of all models.
        retry_budget: Decides which clients may retry.
        live_rollouts, rollouts, rollout_observer: The rollouts of new versions, their admin service and
            their observer.
        observer_batch: Passes ended requests to the observers in batches.
        metrics, timelines, recent, live_state: The observers.
        store_health: The health of the stores.
        scalers: The scalers of the models whose number of replicas follows the demand.
        replica_admin, sleepable_models, pin_admin, cache_admin: Admin services for operators.
        idempotency_store: Stores responses for repeats.
        sharing: Shares answers among requests, with their cache.
        background_responses: Runs the responses that go on without their clients.
        sessions: The login sessions of the console.
        reloader: Reloads the configuration.
        controller: The server that API workers send requests to, if there are workers.
        worker_admin: The admin service of the API workers.
    """

    resources: GatewayResources
    clock: Clock
    registry: EngineRegistry
    in_flight: InFlightLimiter
    websockets: ResponsesWebSockets
    admission: Admission
    queues: ModelQueues
    retry_budget: RetryBudget
    live_rollouts: LiveRollouts
    rollouts: RolloutAdmin
    rollout_observer: RolloutObserver
    observer_batch: ObserverBatch
    metrics: Metrics
    timelines: TimelineBuffer
    recent: RecentTraffic
    live_state: LiveState
    store_health: StoreHealth
    replica_admin: ReplicaAdmin
    scalers: Mapping[str, ModelScaler]
    sleepable_models: SleepableModelAdmin
    pin_admin: PinAdmin
    cache_admin: CacheAdmin
    idempotency_store: MemoryIdempotencyStore
    sharing: AnswerSharing
    background_responses: BackgroundResponses
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
        self.websockets.reconfigure(server)
        self.retry_budget.reconfigure(server.retry_share, server.retry_allowance)
        for pool in self.registry.pools.values():
            pool.reconfigure(server.unread_tokens)
        for scaler in self.scalers.values():
            scaler.reconfigure(config.model.autoscaling)
        access.refresher.reconfigure(identity.refresh_s, identity.max_stale_s)
        access.identity.reconfigure(ANONYMOUS if server.serves_anyone else None)
        self.admission.reconfigure(config.admission)
        self.resources.grammars.reconfigure(config.admission.grammars)
        self.idempotency_store.reconfigure(config.idempotency)
        self.sharing.cache.reconfigure(config.cache)
        if self.sharing.semantic is not None:
            self.sharing.semantic.reconfigure(config.cache)
        if isinstance(answers := self.resources.stores.answers, MemoryBackend):
            answers.reconfigure(config.cache.max_bytes)
        self.background_responses.reconfigure(server.heartbeat_s)
        self.timelines.reconfigure(config.explain.requests)
        self.metrics.reconfigure(config.metrics, config.slos)
        self.sessions.reconfigure(config.console.session_s, config.console.sessions)
        self.live_state.feed.reconfigure(config.console.viewers)


@asynccontextmanager
async def open_resources(
    config: Config,
    pool: ReplicaPool | None,
    clock: Clock,
    show_key: Callable[[str], None],
    outlived: SurvivingWork = NOTHING_SURVIVED,
) -> AsyncIterator[GatewayResources]:
    """Opens all resources of the gateway. Engines begin to start, and the call waits for none.

    Args:
        config: The configuration.
        pool: The replicas of the `model` section, which have begun to start; None: only upstream servers run models.
        clock: The clock.
        show_key: Called with the first admin key, if one had to be made.
        outlived: See `open_stores`.

    Raises:
        ConfigInvalid: There is no model where the configuration says, or a setting refers to something that cannot be
            used.
    """
    on_demand = open_local_models(config, clock)
    local = None
    if pool is not None:
        local = local_model(config, pool.engines, lambda: pool.is_scaled, lambda: pool.stays_ready)
    async with (
        open_traces(config.traces, clock) as traces,
        open_stores(config, clock, outlived) as stores,
        open_access(config, stores.directory, clock, show_key) as access,
        open_upstreams(config.models, config.health) as upstreams,
        open_encoders(config, local.name if local else "", clock) as encoders,
        open_schemas(config.routing.auto) as schemas,
        GrammarValidator(config.admission.grammars) as grammars,
    ):
        resources = GatewayResources(
            traces=traces,
            stores=stores,
            access=access,
            upstreams=upstreams,
            local=local,
            pool=pool,
            on_demand=on_demand,
            encoders=encoders,
            schemas=schemas,
            grammars=grammars,
        )
        await resources.write_opening_balances(config, clock)
        yield resources
