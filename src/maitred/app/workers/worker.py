"""An API worker: HTTP, identity, text. What is decided it asks the controller; tokens come from where they are made.

clients -- HttpServer -- Edge -- Lane (the pipeline) -- replicas
|                   |
`-- Passing         FarControl -- Hotline -- the controller
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING

from maitred.admission.grammars.validator import GrammarValidator
from maitred.admission.policy.retries import RetryBudget
from maitred.api.app import GatewayApp
from maitred.api.chat import ChatRoutes
from maitred.api.completions import CompletionRoutes
from maitred.api.exchange import HttpExchange, Receive, ResponseState, Scope, Send
from maitred.api.health import LIVE
from maitred.api.http.server import HttpServer
from maitred.api.in_flight import InFlightLimiter
from maitred.api.messages import MessagesRoutes
from maitred.api.retry_advice import RetryAdvisor
from maitred.api.routes import Handler, Route, RouteTable
from maitred.app.assembly.stores import running
from maitred.app.assembly.tracing import open_traces
from maitred.app.models.local import LocalModel, local_model
from maitred.app.models.router import Router, routes_of
from maitred.app.models.upstreams import open_upstreams
from maitred.app.request.retry_policy import RetryPolicy
from maitred.app.runtime.gc import collect_seldom
from maitred.app.shutdown import Shutdown
from maitred.app.workers.client import ControllerClient
from maitred.app.workers.context_codec import ended_of
from maitred.app.workers.ipc import RETIRE, IpcDirectory
from maitred.app.workers.pipeline import ForwardToController, LocalModelNames, WorkerPipeline, within_reach
from maitred.app.workers.proxy import ControllerProxy
from maitred.app.workers.remote_flow import RemoteFlowController, RemoteUpstreamStatus, SubmissionTracker
from maitred.config.tree import Config
from maitred.core.answer import RequestContext
from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.core.tenancy import ANONYMOUS
from maitred.dispatch.request import AnyEndpoint
from maitred.engine.models.digest import digest_of
from maitred.engine.models.source import find_model
from maitred.fleet.engines import LocalEngines
from maitred.fleet.remote import FingerprintCheck, RemoteEngine, attached
from maitred.identity.directory import Directory
from maitred.identity.identity import Identity
from maitred.identity.providers import token_issuers
from maitred.identity.refresh import DirectoryRefresher
from maitred.routing.catalog import AnyModel, Catalog
from maitred.wire.address import parse_address
from maitred.wire.worker_protocol import ControllerSnapshot, DirectoryAck

if TYPE_CHECKING:
    from maitred.replica.upstream.replica import UpstreamReplica

_MOST_STALE_S = 10.0
"""The controller knows how old what it says is, and says nothing when it is too old."""
_RAW: ContextVar[tuple[Scope, Send]] = ContextVar("the request in hand as the server gave it")


async def work(config: Config, number: int, listener: socket.socket, house: IpcDirectory, clock: Clock) -> int:
    """Serves until a signal comes.

    Args:
        config: The settings.
        number: Of this worker, from 1.
        listener: Listens; shared with the other workers.
        house: Where the controller is.
        clock: For everything.

    Returns:
        The exit code.
    """
    async with AsyncExitStack() as stack:
        welcomes = ControllerStateFeed()
        line = ControllerClient(number, os.getpid(), house.desk, welcomes.take)
        await stack.enter_async_context(running(line.run(), "line to the controller"))
        welcome = await welcomes.first
        gate = InFlightLimiter(config.server.max_in_flight)
        identity = await _identity(config, line, gate, welcomes, clock, stack)
        lane = await _lane(config, line, welcome, welcomes, clock, stack)
        reporter = RequestReporter(line)
        passing = await stack.enter_async_context(ControllerProxy(house.edge, config.server.max_body_bytes))
        traces = await stack.enter_async_context(open_traces(config.traces, clock))
        table = RouteTable(_own_routes(config, lane, passing, reporter))
        edge = GatewayApp(
            table,
            identity,
            gate,
            [reporter],
            lane.standing,
            RetryAdvisor(RetryBudget(config.server.retry_share, config.server.retry_allowance), clock),
            begin=None if traces is None else traces.begin,
            max_body_bytes=config.server.max_body_bytes,
            body_timeout_s=config.server.body_timeout_s,
            clock=clock,
        )
        server = HttpServer(WorkerApp(edge, table, passing), stall_grace_s=config.server.stall_grace_s, shared=listener)
        shutdown = Shutdown(gate, config.server.drain_grace_s)
        with shutdown.on_signals():
            serving = asyncio.create_task(server.serve(), name="http server")
            serving.add_done_callback(lambda _: shutdown.request())
            collect_seldom()
            house.ready()
            retiring = await _asked_to_retire(shutdown)
            if retiring:
                # Another worker takes its place: nobody is turned away.
                await server.retire(config.server.drain_grace_s)
                stopping = asyncio.create_task(shutdown.requested(), name="shutdown request")
                await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
            if not serving.done():
                await shutdown.drain()
                server.stop(at_once=shutdown.insisted)
                await asyncio.wait([serving])
        serving.result()
    return 0


async def _asked_to_retire(shutdown: Shutdown) -> bool:
    """Waits until this worker is to make room for another, or for the whole gateway to stop; which of them it is."""
    retired = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(RETIRE, retired.set)
    waiting = [asyncio.create_task(retired.wait()), asyncio.create_task(shutdown.requested())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return retired.is_set()
    finally:
        for each in waiting:
            each.cancel()


class ControllerStateFeed:
    """What the controller says, handed on to whom it concerns.

    Attributes:
        first: Done with the first one.
        concerned: Called with each.
    """

    def __init__(self) -> None:
        self.first: asyncio.Future[ControllerSnapshot] = asyncio.get_running_loop().create_future()
        self.concerned: list[Callable[[ControllerSnapshot], None]] = []

    def take(self, welcome: ControllerSnapshot) -> None:
        """There is one."""
        if not self.first.done():
            self.first.set_result(welcome)
        for each in self.concerned:
            each(welcome)


class RequestReporter:
    """Tells the controller of every request that has ended here. Implements `maitred.core.answer.RequestObserver`.

    Args:
        line: To the controller.
    """

    def __init__(self, line: ControllerClient) -> None:
        self._line = line
        self._passed: set[int] = set()

    def leave_out(self, tally: RequestContext) -> None:
        """The controller itself has served it."""
        self._passed.add(id(tally))

    def ended(self, *tallies: RequestContext) -> None:
        """See `Observer.ended`."""
        for tally in tallies:
            if id(tally) in self._passed:
                self._passed.discard(id(tally))
            else:
                self._line.report(ended_of(tally))


class WorkerApp:
    """The ASGI application: what a worker does itself goes to its edge, all else to the controller's.

    Args:
        edge: Its own.
        table: The routes of that.
        passing: The other.
    """

    def __init__(self, edge: GatewayApp, table: RouteTable, passing: ControllerProxy) -> None:
        self._edge = edge
        self._own = {(route.method, route.path) for route in table.routes}
        self._passing = passing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry point."""
        own = (scope["method"], scope["path"]) in self._own
        if own and not any(name == b"idempotency-key" for name, _ in scope["headers"]):
            _RAW.set((scope, send))
            await self._edge(scope, receive, send)
        else:
            await self._passing(scope, receive, send)


def _own_routes(
    config: Config, lane: WorkerPipeline, passing: ControllerProxy, reporter: RequestReporter
) -> list[Route]:
    strict, heartbeat_s = config.server.strict, config.server.heartbeat_s
    routes = [
        *ChatRoutes(lane, strict=strict, heartbeat_s=heartbeat_s).routes(),
        *CompletionRoutes(lane, strict=strict, heartbeat_s=heartbeat_s).routes(),
        *MessagesRoutes(lane, strict=strict, heartbeat_s=heartbeat_s).routes(),
    ]
    served = [
        with_fields(route, handler=_or_passed(route.handler, passing, reporter)) for route in routes if route.idempotent
    ]
    return [*served, LIVE]


def _or_passed(
    handler: Handler, passing: ControllerProxy, reporter: RequestReporter
) -> Callable[[HttpExchange], Awaitable[None]]:
    """The handler; what turns out not to be the worker's own goes to the controller as it came."""

    async def handle(call: HttpExchange) -> None:
        try:
            await handler(call)
        except ForwardToController:
            reporter.leave_out(call.tally)
            scope, send = _RAW.get()
            call.progress = ResponseState.COMPLETE
            call.status = await passing.relay(scope, call.body, send)

    return handle


async def _identity(
    config: Config,
    line: ControllerClient,
    gate: InFlightLimiter,
    welcomes: ControllerStateFeed,
    clock: Clock,
    stack: AsyncExitStack,
) -> Identity:
    """Who calls, by what the controller knows."""
    directory = Directory()
    settings = config.identity
    refresher = DirectoryRefresher(
        line, directory, clock, every_s=settings.refresh_s, max_stale_s=min(settings.max_stale_s, _MOST_STALE_S)
    )
    await refresher.load()
    issuers = await stack.enter_async_context(token_issuers(settings.oidc, directory, clock))
    identity = Identity(
        directory,
        clock,
        check_fresh=refresher.check,
        anonymous=ANONYMOUS if config.server.serves_anyone else None,
        issuers=issuers,
    )
    follower = DirectoryFollower(refresher, directory, line, lambda: gate.recheck(identity.holds))
    welcomes.concerned.append(follower.welcomed)
    await stack.enter_async_context(running(follower.run(), "directory"))
    return identity


class DirectoryFollower:
    """Keeps the directory of a worker as new as that of its controller.

    Args:
        refresher: Reads what is new.
        directory: What is read into.
        line: To the controller, which waits to hear what is known here.
        recheck: Ends the requests of those who may not come in any more.
    """

    def __init__(
        self, refresher: DirectoryRefresher, directory: Directory, line: ControllerClient, recheck: Callable[[], object]
    ) -> None:
        self._refresher = refresher
        self._directory = directory
        self._line = line
        self._changed = asyncio.Event()
        self._recheck = recheck
        refresher.watch(recheck)

    def welcomed(self, welcome: ControllerSnapshot) -> None:
        """There is a version that may be new."""
        self._changed.set()

    async def run(self) -> None:
        """Follows, until it is cancelled."""
        async with running(self._refresher.run(), "directory, now and then"):
            while True:
                self._line.tell(DirectoryAck(self._directory.version))
                await self._changed.wait()
                self._changed.clear()
                with suppress(StoreUnavailable):
                    await self._refresher.load()
                self._recheck()


async def _lane(
    config: Config,
    line: ControllerClient,
    welcome: ControllerSnapshot,
    welcomes: ControllerStateFeed,
    clock: Clock,
    stack: AsyncExitStack,
) -> WorkerPipeline:
    """The pipeline, and all that it stands on."""
    upstreams = await stack.enter_async_context(open_upstreams(config.models, config.health, standing=_standing))
    models: list[AnyModel] = [*upstreams.models]
    posts = dict(upstreams.posts())
    local: LocalModel | None = None
    if welcome.engines:
        engines = await stack.enter_async_context(await _engines(config, welcome))
        local = local_model(config, engines)
        models.append(local.model)
        posts[local.name] = local.posts()
    reach = within_reach(config, None if local is None else local.name)
    named: dict[str, dict[str, AnyEndpoint]] = {
        pool: {post.name: post for post in each} for pool, each in posts.items()
    }
    submissions: dict[str, dict[str, SubmissionTracker]] = {}
    if local is not None:
        submissions[local.name] = {name: SubmissionTracker(engine.link, line) for name, engine in local.engines.items()}
    control = RemoteFlowController(line, named, submissions, config.admission, config.dispatch.recoveries)
    catalog = Catalog(models)
    routes = routes_of(config, catalog)
    own = LocalModelNames(routes, reach)

    def heed(news: ControllerSnapshot) -> None:
        own.on_trial = news.passed
        for pool, window_tokens in news.windows.items():
            for post in named.get(pool, {}).values():
                post.replica.window_tokens = window_tokens

    heed(welcome)
    welcomes.concerned.append(heed)
    grammars = await stack.enter_async_context(GrammarValidator(config.admission.grammars))
    budget = RetryBudget(config.server.retry_share, config.server.retry_allowance)
    lane = WorkerPipeline(
        Router(catalog, routes),
        control,
        clock=clock,
        max_choices=config.model.max_choices,
        least_itl_s=config.dispatch.least_itl_s,
        retries=RetryPolicy(config.dispatch.retries, budget, clock),
        grammars=grammars,
    )
    lane.own = own
    return lane


def _standing(upstream: "UpstreamReplica") -> RemoteUpstreamStatus:
    return RemoteUpstreamStatus(upstream.name, upstream.config.probe_every_s)


async def _engines(config: Config, welcome: ControllerSnapshot) -> LocalEngines:
    """Lines of our own to the engines that the controller looks after."""
    same = FingerprintCheck(await asyncio.to_thread(digest_of, find_model(config.model.folder)))
    remote = bool(config.model.attached)
    engines = LocalEngines(
        {
            name: attached(address, config.engine_link, same)
            if remote
            else RemoteEngine(parse_address(address), silence_timeout_s=config.engine_link.silence_timeout_s)
            for name, address in welcome.engines.items()
        }
    )
    for engine in engines.values():
        engine.link.unread_tokens = config.server.unread_tokens
    return engines
