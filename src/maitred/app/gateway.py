"""A gateway, put together: the way of a request through its parts, and who watches it.

clients -> Edge -> Gate
            |
  Identity  |       who calls: keys and tokens, from the directory in memory
     ^      v
Directory  Pipeline -> Admission -> Counters, Ledger -> database
     ^      +-----> Catalog
 database   +-----> Dispatcher -> EngineLinks <- LocalEngines (each its own process)
                               -> Upstream <- Probe -> servers of others
                               -> Lodger <- Residence: models that come and go
          Embedder -> the same, before an encoder

Metrics, RequestLog, Stories, Traces, Recent <- one Tally per request
                              LiveState <- consoles and `maitred top`, every second
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from maitred.admission.admission import Admission
from maitred.admission.degradation import DegradationStep
from maitred.admission.policy.ladder import Ladder
from maitred.admission.policy.retries import RetryBudget
from maitred.api.admin.administration import administration
from maitred.api.application import build
from maitred.api.edge import Edge
from maitred.api.feedback import FeedbackRoutes
from maitred.api.gate import Gate
from maitred.app.accounts import AccountsView, SoftBudgetAlarm
from maitred.app.console import open_console
from maitred.app.control import LocalControl
from maitred.app.embedding import Embedder
from maitred.app.ground import Ground
from maitred.app.live import LiveState
from maitred.app.local import LocalModel
from maitred.app.own_use import OwnUse
from maitred.app.pins import Pins
from maitred.app.pipeline import Pipeline
from maitred.app.replicas import Replicas
from maitred.app.retrying import Retrying
from maitred.app.rollouts import Rollouts
from maitred.app.roster import Roster, roster_of
from maitred.app.router import Router, routes_of
from maitred.app.sleepers import Sleepers
from maitred.app.stores import recall_rates, running
from maitred.app.trials import Trials
from maitred.cache.memory import MemoryAnswers
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.errand import AnyPost
from maitred.fleet.engines import Engine
from maitred.fleet.sleeper import Sleeper
from maitred.observe.logs import RequestLog
from maitred.observe.metrics import Metrics
from maitred.observe.recent import Recent
from maitred.observe.rounds import Rounds
from maitred.observe.stories import Stories
from maitred.routing.balance.balancer import Balancer
from maitred.routing.catalog import Catalog
from maitred.routing.placement import Placement
from maitred.routing.rollout.live import LiveRollouts


@dataclass(frozen=True, slots=True)
class Gateway:
    """What serves. Made by `open_gateway`.

    Attributes:
        edge: Takes requests.
        gate: Who is inside.
        roster: What is served.
    """

    edge: Edge
    gate: Gate
    roster: Roster


@asynccontextmanager
async def open_gateway(config: Config, ground: Ground, clock: Clock) -> AsyncIterator[Gateway]:
    """Makes every part and wires it to the others; what goes on by itself runs until the context is left.

    Args:
        config: The settings.
        ground: What it stands on.
        clock: The time.

    Raises:
        ConfigInvalid: Two models have one name, or a rollout names one that is not there.
    """
    stores, access, local, on_demand = ground.stores, ground.access, ground.local, ground.on_demand
    alarm = SoftBudgetAlarm()
    recent = Recent(clock)
    await recall_rates(stores, clock)
    admission = Admission(
        access.directory, stores.counters, stores.ledger, config.admission, clock, on_soft_budget=alarm
    )
    roster = roster_of(config, local, on_demand, ground.encoders, ground.upstreams)
    gate = Gate(config.server.max_in_flight)
    accounts = AccountsView(stores, access, admission, alarm, roster.links())
    ladders = _ladders(config, local)

    def wanted(name: str) -> None:
        on_demand.wanted(name)
        sleepers.wanted(name)

    queues = {
        name: Dispatcher(
            *(name, posts, config.dispatch, clock),
            answered=recent.first_token,
            placement=_placement(config, posts, overflows=Ladder(ladders.get(name, ())).overflow_to is not None),
            wanted=partial(wanted, name),
        )
        for name, posts in roster.posts.items()
    }
    loadables = on_demand.loadables(clock)
    sleepers = Sleepers(loadables, {} if local is None else {local.name: (queues[local.name], local.engines.values())})
    dispatchers = {**queues, **ground.encoders.dispatchers}
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
        ground.upstreams.states,
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
    live_state = LiveState(
        *(gate, dispatchers, roster.states, replicas, recent, admission, accounts.stores_up),
        *(Rounds(metrics.samples, clock), clock),
        config.console.viewers,
    )
    retry_budget = RetryBudget(config.server.retry_share, config.server.retry_allowance)
    pipeline = Pipeline(
        router,
        LocalControl(dispatchers, admission, clock),
        {name: Ladder(steps, skipped=metrics.requests.degradation_skipped) for name, steps in ladders.items()},
        clock,
        max_choices=config.model.max_choices,
        least_itl_s=config.dispatch.least_itl_s,
        retries=Retrying(config.dispatch.retries, retry_budget, clock),
        schemas=ground.schemas,
        trials=trials,
        grammars=ground.grammars,
    )
    console_routes, identity = open_console(
        config.console, access.identity, OwnUse(stores.usage, admission, clock), clock
    )
    traces = ground.traces
    edge = build(
        config.server,
        pipeline,
        identity,
        gate,
        [*metrics.observers, RequestLog(), stories, recent, *([] if traces is None else [traces])],
        metrics.render,
        clock,
        embedding=Embedder(router, dispatchers, admission, clock),
        feedback=FeedbackRoutes(stores.feedback, metrics.feedback.given).routes(),
        admin=administration(
            *(stores.directory, stores.usage, admission.budgets, access.refresher.load, replicas, rollouts),
            *(loadables, sleepers, Pins(roster.pinnable, clock), stories),
            *(live_state, access.identity.holds, clock),
        ),
        console=console_routes,
        answers=MemoryAnswers(config.idempotency, clock),
        stores_up=accounts.stores_up,
        check_stores=accounts.check_stores,
        retry_budget=retry_budget,
        begin=None if traces is None else traces.begin,
    )
    access.refresher.watch(lambda: gate.recheck(access.identity.holds))
    async with AsyncExitStack() as background:
        for work, name in (
            (admission.leases.run(), "leases"),
            (rollouts.run(), "rollouts"),
            (metrics.growth.run(), "growth"),
            (metrics.budgets.run(accounts.budgets), "budgets"),
            *((queue.run(), f"dispatch of {name}") for name, queue in queues.items()),
        ):
            await background.enter_async_context(running(work, name))
        await background.enter_async_context(on_demand.running(queues))
        await background.enter_async_context(running(trials.shadows.run(), "shadows"))
        await background.enter_async_context(running(live_state.pulse.run(), "live state"))
        yield Gateway(edge, gate, roster)


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


def _report_steps(metrics: Metrics, where: tuple[str, str], engine: Engine) -> None:
    metrics.steps.heard(where, engine.link.load())
