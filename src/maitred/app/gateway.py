"""A gateway, put together: the way of a request through its parts, and who watches it.

clients -> Reception -> Edge -> Gate
            |
  Identity  |       who calls: keys and tokens, from the directory in memory
     ^      v
Directory  Pipeline -> Admission -> Counters, Ledger -> database
     ^      +-----> Catalog
 database   +-----> Dispatcher -> EngineLinks <- LocalEngines (each its own process)
                               -> Upstream <- Probe -> servers of others
                               -> Lodger <- Residence: models that come and go
          Embedder -> the same, before an encoder

RequestLog, Traces, Digest <- one Tally per request
Metrics, Stories, Recent <- Digest, some at a time, and before anybody reads them
                              LiveState <- consoles and `maitred top`, every second

What is drawn between clients and queues is made anew with every configuration (`ConfigGeneration`); all else stays
(`GatewayServices`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from maitred.admission.admission import Admission
from maitred.admission.policy.retries import RetryBudget
from maitred.api.in_flight import InFlightLimiter
from maitred.app.admin.live import LiveState
from maitred.app.admin.pins import PinAdmin
from maitred.app.admin.replicas import ReplicaAdmin
from maitred.app.admin.rollouts import RolloutAdmin
from maitred.app.admin.sleep import SleepableModelAdmin
from maitred.app.admin.store_health import SoftBudgetAlarm, StoreHealth
from maitred.app.assembly.build import draft_of, regime_of
from maitred.app.assembly.generation import ConfigGeneration, GenerationSwitch
from maitred.app.assembly.queues import open_queues
from maitred.app.assembly.services import GatewayResources, GatewayServices
from maitred.app.assembly.stores import recall_rates, running
from maitred.app.models.registry import roster_of
from maitred.app.reload import Reloader
from maitred.app.request.rollout_observer import RolloutObserver
from maitred.app.runtime.gc import GcSweep
from maitred.app.workers.admin import WorkerAdmin
from maitred.app.workers.controller import ControllerServer
from maitred.app.workers.ipc import IpcDirectory
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.config.tree import Config
from maitred.console.sessions import ConsoleSessions
from maitred.core.clock import Clock
from maitred.core.rollout import RolloutState
from maitred.fleet.engines import Engine
from maitred.observe.live_diagnosis import LiveDiagnosis
from maitred.observe.metrics.registry import Metrics
from maitred.observe.observer_batch import ObserverBatch
from maitred.observe.recent import RecentTraffic
from maitred.observe.timelines import TimelineBuffer
from maitred.routing.rollout.live import LiveRollouts
from maitred.wire.worker_protocol import ControllerSnapshot


class Gateway:
    """What serves. Made by `open_gateway`.

    Args:
        parts: What stays.
        first: The regime that it begins with.

    Attributes:
        application: Takes requests.
        gate: Who is inside.
        roster: What engines of ours serve.
        desk: Where API workers ask, if there are any.
    """

    def __init__(self, parts: GatewayServices, first: ConfigGeneration) -> None:
        self.application = GenerationSwitch(first, self._retire)
        self.gate = parts.gate
        self.roster = parts.roster
        self.desk = parts.desk
        self.desk.adopt(first.control, first.observers)
        self._parts = parts
        self._sweep = GcSweep()
        self._listeners: list[Callable[[Config], None]] = []

    def watch(self, listener: Callable[[Config], None]) -> None:
        """Tells of every configuration that comes into force, for what stands around the gateway. It must not raise."""
        self._listeners.append(listener)

    async def become(self, config: Config) -> None:
        """Puts a configuration in force, which differs from the one before only in what can change.

        All that can fail or take time comes first and changes nothing, but for what the store keeps of tenants and
        rollouts, which is the same at every start. Then everything changes within one turn of the event loop.

        Raises:
            ConfigInvalid: A setting names what cannot be used.
            StoreUnavailable: What is declared cannot be stored.
        """
        parts, before = self._parts, self.application.now.config
        ground = parts.ground
        served = await ground.upstreams.prepare(config.models, config.health)
        draft = draft_of(config, served, parts.roster, ground.local, parts.live, parts.metrics.requests)
        async with running(ground.upstreams.look(served), "first looks") as looked:
            states = await self._declared(before, config)
            await asyncio.wait([looked])

        ground.upstreams.adopt(served, config.models, config.health)
        parts.adopt(before, config)
        parts.queues.adopt(config, draft.posts, draft.ladders)
        parts.rollouts.adopt(draft.router.names, states)
        regime = regime_of(draft, parts)
        self.application.succeed(regime)
        self.desk.adopt(regime.control, regime.observers)
        for listener in self._listeners:
            listener(config)

    async def _declared(self, before: Config, config: Config) -> Sequence[RolloutState] | None:
        """Puts what is declared into the store, as far as it has changed; what is decided of rollouts then."""
        states = None
        if config.routing.rollouts != before.routing.rollouts:
            states = await self._parts.rollouts.declare(config.routing.rollouts)
        if (config.tenants, config.identity) != (before.tenants, before.identity):
            await self._parts.ground.access.declare(config)
        return states

    def _retire(self, living: Sequence[ConfigGeneration]) -> None:
        self._sweep.later()
        self._parts.queues.retire(name for regime in living for name in regime.models)
        self._parts.ground.upstreams.retire(regime.served for regime in living)


@asynccontextmanager
async def open_gateway(
    config: Config, ground: GatewayResources, reloader: Reloader, clock: Clock, house: IpcDirectory | None = None
) -> AsyncIterator[Gateway]:
    """Makes every part and wires it to the others; what goes on by itself runs until the context is left.

    Args:
        config: The settings.
        ground: What it stands on.
        reloader: Brings other settings.
        clock: The time.
        house: Of its processes; None: it is one.

    Raises:
        ConfigInvalid: Two models have one name, or a rollout names one that is not there.
    """
    stores, access, local, on_demand = ground.stores, ground.access, ground.local, ground.on_demand
    alarm = SoftBudgetAlarm()
    digest = ObserverBatch()
    recent = RecentTraffic(clock, digest)
    await recall_rates(stores, clock)
    admission = Admission(
        access.directory, stores.counters, stores.ledger, config.admission, clock, on_soft_budget=alarm
    )
    roster = roster_of(config, local, on_demand, ground.encoders)
    gate = InFlightLimiter(config.server.max_in_flight)
    accounts = StoreHealth(stores, access, admission, alarm, roster.links())

    def wanted(name: str) -> None:
        on_demand.wanted(name)
        sleepers.wanted(name)

    async with AsyncExitStack() as background:
        queues = await background.enter_async_context(
            open_queues(ground.encoders.dispatchers, clock, recent.first_token, wanted)
        )
        replicas = ReplicaAdmin(queues.all, clock)
        live = LiveRollouts()
        desk = ControllerServer(
            gate,
            stores.directory,
            access.refresher,
            lambda: ControllerSnapshot(
                access.directory.version, frozenset(live), ground.upstreams.windows(), roster.addresses(local)
            ),
            clock,
        )
        metrics = Metrics(
            lambda: gate.inside,
            roster.states,
            accounts.state,
            lambda: {name: one.state() for name, one in queues.all.items()},
            ground.upstreams.states,
            on_demand.state,
            replicas.all,
            lambda: rollouts.state(trials.shadows.ends),
            lambda: reloader.state,
            tasks=lambda: len(asyncio.all_tasks()),
            workers=lambda: desk.workers,
            config=config.metrics,
            slos=config.slos,
            clock=clock,
            digest=digest,
        )
        draft = draft_of(config, ground.upstreams.served, roster, local, live, metrics.requests)
        queues.adopt(config, draft.posts, draft.ladders)
        rollouts = RolloutAdmin(stores.rollouts, live, draft.router.names, clock)
        await rollouts.open(config.routing.rollouts)
        trials = RolloutObserver(live, rollouts, clock)
        always = {} if local is None else {local.name: (queues.all[local.name], local.engines.values())}
        sleepers = SleepableModelAdmin(on_demand.loadables(clock), always)
        for where, engine in roster.engines.items():
            engine.link.watch(partial(_report_steps, metrics, where, engine))
        live_state = LiveState(
            *(gate, queues.all, roster.states, replicas, recent, admission, accounts.stores_up),
            *(LiveDiagnosis(metrics.samples, clock), clock),
            config.console.viewers,
        )
        parts = GatewayServices(
            ground=ground,
            clock=clock,
            roster=roster,
            gate=gate,
            admission=admission,
            queues=queues,
            retry_budget=RetryBudget(config.server.retry_share, config.server.retry_allowance),
            live=live,
            rollouts=rollouts,
            trials=trials,
            digest=digest,
            metrics=metrics,
            stories=TimelineBuffer(config.explain.requests, clock, digest),
            recent=recent,
            live_state=live_state,
            accounts=accounts,
            replicas=replicas,
            sleepers=sleepers,
            pins=PinAdmin(roster.pinnable, clock),
            answers=MemoryIdempotencyStore(config.idempotency, clock),
            sessions=ConsoleSessions(clock, config.console.session_s, config.console.sessions),
            reloader=reloader,
            desk=desk,
            staff=WorkerAdmin(lambda: desk.clerks, house),
        )
        gateway = Gateway(parts, regime_of(draft, parts))
        access.refresher.watch(lambda: gate.recheck(access.identity.holds))
        access.refresher.watch(parts.desk.look)
        for work, name in (
            (admission.leases.run(), "leases"),
            (rollouts.run(), "rollouts"),
            (metrics.growth.run(), "growth"),
            (metrics.budgets.run(accounts.budgets), "budgets"),
        ):
            await background.enter_async_context(running(work, name))
        await background.enter_async_context(on_demand.running(queues.all))
        await background.enter_async_context(running(trials.shadows.run(), "shadows"))
        await background.enter_async_context(running(live_state.pulse.run(), "live state"))
        reloader.applies(gateway.become)
        yield gateway


def _report_steps(metrics: Metrics, where: tuple[str, str], engine: Engine) -> None:
    metrics.steps.heard(where, engine.link.load())
