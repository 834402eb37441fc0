"""Assembly of a gateway process: the parts that a request passes, and the parts that observe it.

clients -> HttpServer -> GatewayApp -> InFlightLimiter
                               |
  Authenticator  <-------------+   who calls: keys and tokens, from the directory in memory
     ^                         v
Directory                   Pipeline -> Admission -> Counters, UsageLedger -> database
     ^                         +------> EngineRegistry, Router
 database                      +------> Dispatcher -> EngineClient     <- ReplicaPool (each engine its own process)
                                                   -> UpstreamReplica  <- HealthProbe -> servers of others
                                                                       <- ModelManager: pools of models that come and go
                            Embedder -> the same, before an encoder

RequestLog, TraceObserver, ObserverBatch <- one RequestContext per request
Metrics, TimelineBuffer, RecentTraffic <- ObserverBatch: several requests at a time, and before anybody reads them
                              LiveState <- consoles and `maitred top`, every second

A new configuration replaces the parts between clients and queues (`ConfigGeneration`); all other parts stay
(`GatewayServices`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from maitred.admission.admission import Admission
from maitred.admission.policy.retries import RetryBudget
from maitred.api.app import GatewayApp
from maitred.api.in_flight import InFlightLimiter
from maitred.api.responses.background import BackgroundResponses
from maitred.api.responses.websocket import ResponsesWebSockets
from maitred.app.admin.cache import CacheAdmin
from maitred.app.admin.live import LiveState
from maitred.app.admin.pins import PinAdmin
from maitred.app.admin.replicas import ReplicaAdmin
from maitred.app.admin.rollouts import RolloutAdmin
from maitred.app.admin.scaling import ScalingAdmin
from maitred.app.admin.sleep import SleepableModelAdmin
from maitred.app.admin.store_health import SoftBudgetAlarm, StoreHealth
from maitred.app.assembly.build import build_generation, draft_generation
from maitred.app.assembly.generation import ConfigGeneration, GenerationSwitch
from maitred.app.assembly.queues import ModelQueues, open_queues
from maitred.app.assembly.scaling import make_claims, make_scalers
from maitred.app.assembly.services import GatewayResources, GatewayServices
from maitred.app.assembly.stores import restore_rates, running
from maitred.app.models.registry import open_registry
from maitred.app.reload import Reloader
from maitred.app.request.answer_sharing import AnswerSharing
from maitred.app.request.rollout_observer import RolloutObserver
from maitred.app.runtime import GcSweep
from maitred.app.scaling.lease import hold_lease
from maitred.app.scaling.scaler import ModelScaler
from maitred.app.semantic.cache import SemanticCache
from maitred.app.semantic.encoder import QuestionEncoder
from maitred.app.workers.admin import WorkerAdmin
from maitred.app.workers.controller_server import ControllerServer
from maitred.app.workers.ipc import IpcFolder
from maitred.cache.answer_cache import AnswerCache
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.config.tree import Config
from maitred.console.sessions import ConsoleSessions
from maitred.core.clock import Clock
from maitred.core.rollout import RolloutState
from maitred.fleet.backend import LeasedBackend, ManagedEngine
from maitred.fleet.pool import ReplicaPool
from maitred.observe.live_diagnosis import LiveDiagnosis
from maitred.observe.metrics.registry import Metrics
from maitred.observe.metrics.reloads import ReloadMetrics
from maitred.observe.metrics.replicas import AgentMetrics, ReplicaMetrics
from maitred.observe.metrics.residency import ResidencyMetrics
from maitred.observe.metrics.rollouts import RolloutMetrics
from maitred.observe.metrics.scaling import ScalingMetrics
from maitred.observe.metrics.semantic import SemanticCacheMetrics
from maitred.observe.metrics.stores import AccountMetrics, CacheMetrics
from maitred.observe.metrics.upstreams import UpstreamMetrics
from maitred.observe.observer_batch import ObserverBatch
from maitred.observe.recent import RecentTraffic
from maitred.observe.timelines import TimelineBuffer
from maitred.routing.rollout.live import LiveRollouts
from maitred.wire.worker_protocol import ControllerSnapshot


class Gateway:
    """Gateway process that serves requests; `open_gateway` makes it.

    Args:
        parts: The services that stay when the configuration changes.
        first: The first generation of the configuration.

    Attributes:
        in_flight: The limiter of requests in flight.
        registry: The models and engines that the gateway itself runs.
        controller: The server that API workers send requests to, if there are workers.
    """

    def __init__(self, parts: GatewayServices, first: ConfigGeneration) -> None:
        self._generations = GenerationSwitch(first, self._retire)
        self.in_flight = parts.in_flight
        self.registry = parts.registry
        self.controller = parts.controller
        self.controller.reconfigure(first.flow_controller, first.observers)
        self._services = parts
        self._gc_sweep = GcSweep()
        self._listeners: list[Callable[[Config], None]] = []

    @property
    def application(self) -> GatewayApp:
        """ASGI application of new requests; it changes with the configuration, before `watch` tells of that."""
        return self._generations.current.app

    def watch(self, listener: Callable[[Config], None]) -> None:
        """Calls `listener` with every configuration that is applied, for code outside the gateway.

        The listener must not raise.
        """
        self._listeners.append(listener)

    async def apply_config(self, config: Config) -> None:
        """Applies a configuration that differs from the current one only in changeable settings.

        All steps that can fail or take time run first and change nothing, except the tenants and rollouts in the store,
        which are the same after every start. Then all other changes are made within one turn of the event loop.

        Raises:
            ConfigInvalid: A setting refers to something that cannot be used.
            StoreUnavailable: The declared tenants or rollouts cannot be stored.
        """
        parts, before = self._services, self._generations.current.config
        resources = parts.resources
        served = await resources.upstreams.prepare(config.models, config.health)
        draft = draft_generation(
            config, served, parts.registry, resources.local, parts.live_rollouts, parts.metrics.requests
        )
        async with running(resources.upstreams.refresh(served), "first looks") as looked:
            states = await self._declare(before, config)
            await asyncio.wait([looked])

        resources.upstreams.reconfigure(served, config.models, config.health)
        parts.reconfigure(before, config)
        parts.queues.reconfigure(config, {**draft.endpoints, **parts.registry.endpoints}, draft.ladders)
        parts.rollouts.reconfigure(draft.router.names, states)
        generation = build_generation(draft, parts)
        self._generations.switch_to(generation)
        self.controller.reconfigure(generation.flow_controller, generation.observers)
        for listener in self._listeners:
            listener(config)

    async def _declare(self, before: Config, config: Config) -> Sequence[RolloutState] | None:
        """Stores the changed declarations of the configuration; returns the resulting states of the rollouts."""
        states = None
        if config.routing.rollouts != before.routing.rollouts:
            states = await self._services.rollouts.declare(config.routing.rollouts)
        if (config.tenants, config.identity) != (before.tenants, before.identity):
            resources = self._services.resources
            await resources.access.declare(config)
            await resources.write_opening_balances(config, self._services.clock)
        return states

    def _retire(self, living: Sequence[ConfigGeneration]) -> None:
        self._gc_sweep.later()
        self._services.queues.retire(name for generation in living for name in generation.models)
        self._services.resources.upstreams.retire(generation.upstream_models for generation in living)


@asynccontextmanager
async def open_gateway(
    config: Config, resources: GatewayResources, reloader: Reloader, clock: Clock, ipc: IpcFolder | None = None
) -> AsyncIterator[Gateway]:
    """Makes all parts and connects them; their background tasks run until the context ends.

    Args:
        config: The configuration.
        resources: The resources that the gateway uses.
        reloader: Reloads the configuration.
        clock: The clock.
        ipc: Folder of the sockets between the gateway's processes; None: the gateway is one process.

    Raises:
        ConfigInvalid: Two models have the same name, or a rollout names a model that does not exist.
    """
    stores, access, local, on_demand = resources.stores, resources.access, resources.local, resources.on_demand
    alarm = SoftBudgetAlarm()
    observer_batch = ObserverBatch()
    recent = RecentTraffic(clock)
    await restore_rates(stores, clock)
    admission = Admission(
        limits=access.directory,
        counters=stores.counters,
        ledger=stores.ledger,
        config=config.admission,
        clock=clock,
        on_soft_budget=alarm,
    )
    registry = open_registry(config, local, resources.pool, on_demand, resources.encoders)
    in_flight = InFlightLimiter(config.server.max_in_flight)
    websockets = ResponsesWebSockets(config.server, in_flight, clock)
    accounts = StoreHealth(stores, access, admission, alarm, output_tokens=registry.output_tokens)

    def on_model_wanted(name: str) -> None:
        on_demand.on_wanted(name)
        sleepables.on_wanted(name)

    async with AsyncExitStack() as background:
        queues = await background.enter_async_context(
            open_queues(resources.encoders.dispatchers, clock, recent.on_first_token, on_model_wanted)
        )
        scalers: dict[str, ModelScaler] = {}
        scaling = ScalingAdmin(scalers, clock)
        replicas = ReplicaAdmin(queues.all, registry.generating, clock, scaling, on_demand=registry.on_demand)
        live_rollouts = LiveRollouts(config.region)
        controller = ControllerServer(
            in_flight,
            stores.directory,
            access.refresher,
            make_snapshot=lambda: ControllerSnapshot(
                access.directory.version,
                frozenset(live_rollouts),
                resources.upstreams.context_tokens_by_pool(),
                registry.addresses(),
                stays_ready=any(pool.stays_ready for pool in registry.resident.values()),
            ),
            clock=clock,
            answers=resources.stores.answers,
            on_worker_retires=websockets.drain_peer,
        )
        answer_cache = AnswerCache(config.cache, resources.stores.answers, clock)
        semantic = None
        for encoder in resources.encoders.served:
            semantic = SemanticCache(answer_cache, QuestionEncoder(encoder, clock), stores.semantic, clock)
        metrics = Metrics(
            lambda: in_flight.count,
            registry.states,
            lambda: {name: dispatcher.snapshot() for name, dispatcher in queues.all.items()},
            [
                UpstreamMetrics(resources.upstreams.states),
                ResidencyMetrics(on_demand.state),
                ReplicaMetrics(replicas.all),
                AgentMetrics(replicas.agents),
                ScalingMetrics(scaling.states),
                RolloutMetrics(lambda: rollouts.state(rollout_observer.shadow_traffic.outcome_counts)),
                ReloadMetrics(lambda: reloader.state),
                AccountMetrics(accounts.state),
                CacheMetrics(resources.stores.answers.state),
                SemanticCacheMetrics(dict if semantic is None else semantic.states),
            ],
            tasks=lambda: len(asyncio.all_tasks()),
            websockets=lambda: websockets.count,
            workers=lambda: controller.workers,
            config=config.metrics,
            slos=config.slos,
            clock=clock,
            batch=observer_batch,
        )
        draft = draft_generation(config, resources.upstreams.current, registry, local, live_rollouts, metrics.requests)
        queues.reconfigure(config, draft.endpoints, draft.ladders)
        for name, pool in registry.generating.items():
            pool.on_endpoints(partial(_set_endpoints, queues, controller, name, pool))
        rollouts = RolloutAdmin(stores.rollouts, live_rollouts, draft.router.names, clock)
        await rollouts.open(config.routing.rollouts)
        rollout_observer = RolloutObserver(live_rollouts, rollouts, clock)
        always = {name: (queues.all[name], pool) for name, pool in registry.resident.items()}
        replicas.claims |= background.enter_context(make_claims(config, registry.resident, stores.scaler_leases, clock))
        scalers |= make_scalers(
            config,
            registry.resident,
            dispatchers=queues.all,
            claims=replicas.claims,
            exchange=stores.scaling_demands,
            clock=clock,
        )
        sleepables = SleepableModelAdmin(on_demand.loadables(clock), always)
        pins = PinAdmin(registry.pinnable, clock)
        registry.on_engine(partial(_watch_engine, metrics, pins))
        live_state = LiveState(
            in_flight,
            dispatchers=queues.all,
            engines=registry.states,
            replicas=replicas,
            recent=recent,
            admission=admission,
            stores_up=accounts.stores_up,
            diagnosis=LiveDiagnosis(metrics.samples, clock),
            clock=clock,
            max_viewers=config.console.viewers,
        )
        idempotency_store = MemoryIdempotencyStore(config.idempotency, clock)
        background_responses = BackgroundResponses(
            stores.responses, idempotency_store, in_flight, heartbeat_s=config.server.heartbeat_s
        )
        sharing = AnswerSharing(answer_cache, None if ipc is None else controller.answer_peers, semantic)
        background.push_async_callback(controller.answer_peers.serve(sharing).close)
        parts = GatewayServices(
            resources=resources,
            clock=clock,
            registry=registry,
            in_flight=in_flight,
            websockets=websockets,
            admission=admission,
            queues=queues,
            retry_budget=RetryBudget(config.server.retry_share, config.server.retry_allowance),
            live_rollouts=live_rollouts,
            rollouts=rollouts,
            rollout_observer=rollout_observer,
            observer_batch=observer_batch,
            metrics=metrics,
            timelines=TimelineBuffer(config.explain.requests, clock, observer_batch),
            recent=recent,
            live_state=live_state,
            store_health=accounts,
            replica_admin=replicas,
            scalers=scalers,
            sleepable_models=sleepables,
            pin_admin=pins,
            cache_admin=CacheAdmin(
                resources.stores.answers,
                recent,
                stores.semantic,
                settings=lambda: answer_cache.config.semantic,
                on_change=None if semantic is None else semantic.forget,
            ),
            idempotency_store=idempotency_store,
            sharing=sharing,
            background_responses=background_responses,
            sessions=ConsoleSessions(clock, config.console.session_s, config.console.sessions),
            reloader=reloader,
            controller=controller,
            worker_admin=WorkerAdmin(lambda: controller.sessions, ipc),
        )
        gateway = Gateway(parts, build_generation(draft, parts))
        access.refresher.watch(lambda: in_flight.cancel_revoked(access.identity.holds))
        access.refresher.watch(lambda: websockets.close_revoked(access.identity.holds))
        access.refresher.watch(parts.controller.send_snapshots_if_changed)
        for work, name in (
            (admission.leases.run(), "leases"),
            (rollouts.run(), "rollouts"),
            (background_responses.run(), "background responses"),
            (metrics.growth.run(), "growth"),
            (metrics.budgets.run(accounts.budgets), "budgets"),
        ):
            await background.enter_async_context(running(work, name))
        await background.enter_async_context(on_demand.running(queues.all))
        await background.enter_async_context(running(rollout_observer.shadow_traffic.run(), "shadows"))
        await background.enter_async_context(running(live_state.feed.run(), "live state"))
        for name, pool in registry.resident.items():
            if isinstance(pool.backend, LeasedBackend):
                lease = hold_lease(replicas.claims[name], pool.backend)
                await background.enter_async_context(running(lease, f"lease of {name}"))
        for scaler in scalers.values():
            await background.enter_async_context(running(scaler.run(), f"scaling of {scaler.model}"))
        if semantic is not None:
            await background.enter_async_context(running(semantic.run(), "semantic cache"))
        reloader.applies(gateway.apply_config)
        yield gateway


def _set_endpoints(queues: ModelQueues, controller: ControllerServer, model: str, pool: ReplicaPool) -> None:
    """Applies a change of a pool's endpoints: workers know a new engine before a request is sent there."""
    controller.send_snapshots_if_changed()
    queues.set_endpoints(model, pool.endpoints())


def _watch_engine(metrics: Metrics, pins: PinAdmin, where: tuple[str, str], engine: ManagedEngine) -> None:
    engine.client.on_change(partial(_report_steps, metrics, where, engine))
    pins.watch(*where, engine.client)


def _report_steps(metrics: Metrics, where: tuple[str, str], engine: ManagedEngine) -> None:
    metrics.steps.on_report(where, engine.client.load())
