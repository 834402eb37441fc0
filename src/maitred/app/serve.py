"""`maitred serve`: makes every part and wires it to the others.

    signals -> Shutdown -> Gate <- Edge <- HttpServer <- clients
                                    |
                     Identity       |       who calls: keys and tokens, from the directory in memory
                        ^           v
                     Directory   Pipeline -> Admission -> Counters, Ledger -> database
                        ^           +-----> Catalog
                     database       +-----> Dispatcher -> EngineLinks <- LocalEngines (each its own process)
                                                       -> Upstream <- Probe -> servers of others
                                                       -> Lodger <- Residence: models that come and go
                                 Embedder -> the same, before an encoder

    Metrics, RequestLog, Stories, Traces, Recent <- one Tally per request
                                  LiveState <- consoles and `maitred top`, every second

The HTTP server listens before the engine is ready: whoever comes early gets a 503 that says when to come back, and a
probe sees the process alive but not ready.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import uvloop
from rich.console import Console
from rich.markup import escape

from maitred.admission.admission import Admission
from maitred.admission.degradation import DegradationStep
from maitred.admission.grammars.desk import GrammarDesk
from maitred.admission.policy.ladder import Ladder
from maitred.admission.policy.retries import RetryBudget
from maitred.api.admin.administration import administration
from maitred.api.application import build
from maitred.api.gate import Gate
from maitred.app.access import open_access
from maitred.app.accounts import AccountsView, SoftBudgetAlarm
from maitred.app.banner import announce, announce_on_demand, announce_upstreams, show_key
from maitred.app.console import open_console
from maitred.app.embedding import Embedder
from maitred.app.encoder import Encoders, open_encoders
from maitred.app.escalation import open_schemas
from maitred.app.garbage import collect_seldom
from maitred.app.listener import HttpServer, bind, url_of
from maitred.app.live import LiveState
from maitred.app.local import LocalModel, open_local
from maitred.app.own_use import OwnUse
from maitred.app.pins import Pins
from maitred.app.pipeline import Pipeline
from maitred.app.replicas import Replicas
from maitred.app.residents import open_local_models
from maitred.app.retrying import Retrying
from maitred.app.rollouts import Rollouts
from maitred.app.roster import roster_of
from maitred.app.router import Router, routes_of
from maitred.app.shutdown import Shutdown
from maitred.app.sleepers import Sleepers
from maitred.app.stores import open_stores, recall_rates, running
from maitred.app.tracing import open_traces
from maitred.app.trials import Trials
from maitred.app.upstreams import open_upstreams
from maitred.cache.memory import MemoryAnswers
from maitred.config.loader import LoadedConfig
from maitred.config.tree import Config
from maitred.core.clock import SystemClock
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.errand import AnyPost
from maitred.fleet.engines import Engine, Engines
from maitred.fleet.local import Command
from maitred.fleet.sleeper import Sleeper
from maitred.observe.logs import RequestLog, set_up
from maitred.observe.metrics import Metrics
from maitred.observe.recent import Recent
from maitred.observe.stories import Stories
from maitred.routing.balance.balancer import Balancer
from maitred.routing.catalog import Catalog
from maitred.routing.placement import Placement
from maitred.routing.rollout.live import LiveRollouts


def run(loaded: LoadedConfig, command: Command | None = None) -> int:
    """Serves until a signal comes.

    Args:
        loaded: The configuration.
        command: Starts the engine; by default the one of this installation. Tests bring their own.

    Returns:
        The exit code: 0 after a drain, also if it had to cut answers short.

    Raises:
        ConfigInvalid: No model is where the configuration says, or the address is taken.
        ReplicaUnavailable: The engine did not start; the message has its last words.
    """
    config = loaded.config
    set_up(config.log)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, command))


async def _serve(config: Config, command: Command | None) -> int:
    console = Console()
    clock = SystemClock()
    on_demand = open_local_models(config, clock)
    listener = bind(config.server)
    async with (
        open_traces(config.traces, clock) as traces,
        open_stores(config, clock) as stores,
        open_access(config, stores.directory, clock, partial(show_key, console)) as access,
        open_upstreams(config.models, config.health) as upstreams,
        # Last: who may not serve from this folder must not take an accelerator's memory from who does.
        open_local(config, command, clock) as local,
        open_encoders(config, local.name if local else "", clock) as encoders,
        open_schemas(config.routing.auto) as schemas,
        GrammarDesk(config.admission.grammars) as grammars,
    ):
        alarm = SoftBudgetAlarm()
        recent = Recent(clock)
        await recall_rates(stores, clock)
        admission = Admission(
            access.directory,
            stores.counters,
            stores.ledger,
            config.admission,
            clock,
            on_soft_budget=alarm,
        )
        roster = roster_of(config, local, on_demand, encoders, upstreams)
        gate = Gate(config.server.max_in_flight)
        accounts = AccountsView(stores, access, admission, alarm, roster.links())
        ladders = _ladders(config, local)

        def wanted(name: str) -> None:
            on_demand.wanted(name)
            sleepers.wanted(name)

        queues = {
            name: Dispatcher(
                *(name, of_model, config.dispatch, clock),
                answered=recent.first_token,
                placement=_placement(config, of_model, overflows=Ladder(ladders.get(name, ())).overflow_to is not None),
                wanted=partial(wanted, name),
            )
            for name, of_model in roster.posts.items()
        }
        pins = Pins(roster.pinnable, clock)
        loadables = on_demand.loadables(clock)
        always = {} if local is None else {local.name: (queues[local.name], local.engines.values())}
        sleepers = Sleepers(loadables, always)
        dispatchers = {**queues, **encoders.dispatchers}
        replicas = Replicas(dispatchers, clock)
        catalog = Catalog(roster.models)
        live = LiveRollouts()
        router = Router(catalog, routes_of(config, catalog), live)
        rollouts = Rollouts(stores.rollouts, live, router.names, clock)
        await rollouts.open(config.routing.rollouts)
        trials = Trials(live, rollouts, clock)

        metrics = Metrics(
            lambda: gate.inside,
            roster.states,
            accounts.state,
            lambda: {name: one.state() for name, one in dispatchers.items()},
            upstreams.states,
            on_demand.state,
            replicas.all,
            lambda: rollouts.state(trials.shadows.ends),
            tasks=lambda: len(asyncio.all_tasks()),
            config=config.metrics,
            slos=config.slos,
            clock=clock,
        )
        for where, engine in roster.engines.items():
            engine.link.watch(partial(_report_steps, metrics, where, engine))
        stories = Stories(config.explain.requests, clock)
        retry_budget = RetryBudget(config.server.retry_share, config.server.retry_allowance)
        pipeline = Pipeline(
            router,
            dispatchers,
            admission,
            {name: Ladder(steps, skipped=metrics.requests.degradation_skipped) for name, steps in ladders.items()},
            clock,
            max_choices=config.model.max_choices,
            least_itl_s=config.dispatch.least_itl_s,
            retries=Retrying(config.dispatch.retries, retry_budget, clock),
            schemas=schemas,
            trials=trials,
            grammars=grammars,
        )
        live_state = LiveState(
            *(gate, dispatchers, roster.states, replicas, recent, admission, accounts.stores_up, clock),
            config.console.viewers,
        )
        console_routes, identity = open_console(
            config.console, access.identity, OwnUse(stores.usage, admission, clock), clock
        )
        edge = build(
            config.server,
            pipeline,
            identity,
            gate,
            [*metrics.observers, RequestLog(), stories, recent, *([] if traces is None else [traces])],
            metrics.render,
            clock,
            embedding=Embedder(router, dispatchers, admission, clock),
            admin=administration(
                *(stores.directory, stores.usage, admission.budgets, access.refresher.load, replicas, rollouts),
                *(loadables, sleepers, pins, stories),
                *(live_state, access.identity.holds, clock),
            ),
            console=console_routes,
            answers=MemoryAnswers(config.idempotency, clock),
            stores_up=accounts.stores_up,
            check_stores=accounts.check_stores,
            retry_budget=retry_budget,
            begin=None if traces is None else traces.begin,
        )
        server = HttpServer(edge, stall_grace_s=config.server.stall_grace_s)
        shutdown = Shutdown(gate, config.server.drain_grace_s)
        access.refresher.watch(lambda: gate.recheck(access.identity.holds))
        async with AsyncExitStack() as background:
            await background.enter_async_context(running(admission.leases.run(), "leases"))
            await background.enter_async_context(running(rollouts.run(), "rollouts"))
            await background.enter_async_context(running(metrics.growth.run(), "growth"))
            for name, dispatcher in queues.items():
                await background.enter_async_context(running(dispatcher.run(), f"dispatch of {name}"))
            await background.enter_async_context(on_demand.running(queues))
            await background.enter_async_context(running(trials.shadows.run(), "shadows"))
            await background.enter_async_context(running(live_state.pulse.run(), "live state"))
            with shutdown.on_signals():
                serving = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
                serving.add_done_callback(lambda _: shutdown.request())
                loading = "".join(f"; {escape(name)} is being loaded" for name in roster.starting)
                console.print(f"Listening at {url_of(listener)}{loading}.", highlight=False)
                if config.console.enabled:
                    console.print(f"The console is at {url_of(listener)}/console.", highlight=False)
                try:
                    if upstreams.models:
                        announce_upstreams(console, url_of(listener), upstreams.models, first=local is None)
                    if on_demand.models:
                        announce_on_demand(
                            *(console, url_of(listener), on_demand.models),
                            first=local is None and not upstreams.models,
                        )
                    if await _is_up(None if local is None else local.engines, encoders, shutdown):
                        collect_seldom()
                        if local is not None:
                            announce(console, url_of(listener), local.name, local.model.card())
                    await shutdown.requested()
                    await shutdown.drain()
                finally:
                    server.stop(at_once=shutdown.insisted)
                    await asyncio.wait([serving])
        serving.result()
    return 0


def _placement(config: Config, posts: Sequence[AnyPost], *, overflows: bool) -> Placement | None:
    """Which of several replicas takes a request, and what their caches hold. One alone need not be followed."""
    if len(posts) == 1 and not overflows:
        return None
    placement = Placement(Balancer(config.routing.balance, config.dispatch.service.weights, random.random))
    for post in posts:
        if isinstance(post.replica, Sleeper):
            post.replica.link.follow_blocks(partial(placement.heard, post.name))
    return placement


def _ladders(config: Config, local: LocalModel | None) -> dict[str, list[DegradationStep]]:
    """Model -> what is tried before a request for it is refused."""
    ladders = {name: model.degradation for name, model in config.models.items()}
    if local is not None:
        ladders[local.name] = config.model.degradation
    return ladders


async def _is_up(engines: Engines | None, encoders: Encoders, shutdown: Shutdown) -> bool:
    """Waits until an engine is ready, and the encoder; False if we are told to stop before that.

    Raises:
        ReplicaUnavailable: No engine can start, or the encoder cannot.
    """

    async def started() -> None:
        if engines is not None:
            await engines.started()
        await encoders.started()

    starting = asyncio.create_task(started(), name="engine start")
    stopping = asyncio.create_task(shutdown.requested(), name="shutdown request")
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return starting.done()
    finally:
        starting.cancel()
        stopping.cancel()


def _report_steps(metrics: Metrics, where: tuple[str, str], engine: Engine) -> None:
    metrics.steps.heard(where, engine.link.load())
