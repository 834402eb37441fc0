"""A worker process: it serves HTTP, authentication and text. The controller decides; replicas send tokens directly.

clients -- HttpServer -- GatewayApp -- WorkerPipeline -- replicas
|                        |
`-- ControllerProxy      RemoteFlowController -- ControllerClient -- the controller
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
from maitred.api.app import GatewayApp, RetryAdvisor
from maitred.api.chat import ChatRoutes
from maitred.api.completions import CompletionRoutes
from maitred.api.exchange import HttpExchange, Receive, ResponseState, Scope, Send
from maitred.api.health import LIVE
from maitred.api.http.server import LAST_WORDS_S, HttpServer
from maitred.api.in_flight import InFlightLimiter
from maitred.api.messages import MessagesRoutes
from maitred.api.origin_policy import OriginPolicy
from maitred.api.routes import Handler, Route, RouteTable
from maitred.app.assembly.stores import running
from maitred.app.assembly.tracing import open_traces
from maitred.app.models.local import LocalModel, local_model
from maitred.app.models.router import Router, read_routes
from maitred.app.models.upstreams import litellm_headers, open_upstreams
from maitred.app.request.answer_sharing import AnswerSharing
from maitred.app.request.planner import RequestBounds
from maitred.app.request.retry_policy import RetryPolicy
from maitred.app.runtime import tune_gc
from maitred.app.shutdown import Shutdown
from maitred.app.workers.answer_peers import PeerReaders, WorkerPeers
from maitred.app.workers.context_codec import encode_context
from maitred.app.workers.controller_client import ControllerClient
from maitred.app.workers.engines import WorkerEngines
from maitred.app.workers.ipc import RETIRE, IpcFolder
from maitred.app.workers.pipeline import ForwardToController, LocalModelNames, WorkerPipeline, locally_served_pools
from maitred.app.workers.proxy import ControllerProxy
from maitred.app.workers.remote_backend import RemoteBackend
from maitred.app.workers.remote_flow import RemoteFlowController, RemoteUpstreamStatus, SubmissionAcker
from maitred.cache.answer_cache import AnswerCache
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import StoreUnavailable
from maitred.core.tenancy import ANONYMOUS
from maitred.dispatch.request import AnyEndpoint
from maitred.engine.models.digest import fingerprint_of
from maitred.engine.models.source import find_model
from maitred.fleet.remote import FingerprintCheck, RemoteEngine, make_remote_engine
from maitred.identity.directory import Directory
from maitred.identity.identity import DirectoryRefresher, Identity
from maitred.identity.providers import token_issuers
from maitred.routing.catalog import AnyModel, Catalog
from maitred.wire.address import parse_address
from maitred.wire.worker_protocol import ControllerSnapshot, DirectoryAck, WorkerRetires

if TYPE_CHECKING:
    from maitred.replica.upstream.replica import UpstreamReplica

_MAX_STALE_S = 10.0
"""Most age of the directory in a worker.

The controller knows the age of its data, and replies with an error when it is too old.
"""
_ASGI_REQUEST: ContextVar[tuple[Scope, Send]] = ContextVar("the request in hand as the server gave it")


async def run_worker(config: Config, worker_number: int, listener: socket.socket, ipc: IpcFolder, clock: Clock) -> int:
    """Runs a worker until a signal comes.

    Args:
        config: The settings.
        worker_number: The number of this worker, from 1.
        listener: The listening socket, shared with the other workers.
        ipc: Where the controller is.
        clock: The time.

    Returns:
        The exit code.
    """
    async with AsyncExitStack() as stack:
        snapshot_feed = SnapshotFeed()
        controller = ControllerClient(worker_number, os.getpid(), ipc.controller_ipc_socket, snapshot_feed.on_snapshot)
        await stack.enter_async_context(running(controller.run(), "controller connection"))
        await snapshot_feed.first_snapshot
        in_flight = InFlightLimiter(config.server.max_in_flight)
        identity = await _open_identity(config, controller, in_flight, snapshot_feed, clock, stack)
        pipeline, peer_readers = await _open_pipeline(config, controller, snapshot_feed, clock, stack)
        reporter = RequestReporter(controller)
        proxy = await stack.enter_async_context(
            ControllerProxy(ipc.controller_http_socket, config.server.max_body_bytes)
        )
        traces = await stack.enter_async_context(open_traces(config.traces, clock))
        route_table = RouteTable(_local_routes(config, pipeline, proxy, reporter, clock))
        app = GatewayApp(
            route_table,
            identity,
            in_flight,
            observers=[reporter],
            rate_limit_status=pipeline.rate_limit_status,
            retries=RetryAdvisor(RetryBudget(config.server.retry_share, config.server.retry_allowance), clock),
            begin=None if traces is None else traces.start_trace,
            check_limits=pipeline.check_limits,
            max_body_bytes=config.server.max_body_bytes,
            body_timeout_s=config.server.body_timeout_s,
            origin_policy=OriginPolicy(config.server),
            clock=clock,
        )
        server = HttpServer(
            WorkerApp(app, route_table, proxy), stall_grace_s=config.server.stall_grace_s, shared=listener
        )
        shutdown = Shutdown(in_flight, config.server.drain_grace_s)
        with shutdown.on_signals():
            serve_task = asyncio.create_task(server.serve(), name="http server")
            serve_task.add_done_callback(lambda _: shutdown.request())
            tune_gc()
            ipc.notify_ready()
            retires = await _wait_retire_or_stop(shutdown)
            drain_until_s = clock.monotonic_s() + config.server.drain_grace_s
            if retires:
                # A successor accepts new connections, so no client is refused.
                controller.send(WorkerRetires())
                await server.retire(config.server.drain_grace_s)
                stop_task = asyncio.create_task(shutdown.wait_requested(), name="shutdown request")
                await asyncio.wait([serve_task, stop_task], return_when=asyncio.FIRST_COMPLETED)
                stop_task.cancel()
            if not serve_task.done():
                drain_until_s = clock.monotonic_s() + config.server.drain_grace_s
                await shutdown.drain()
                # What was passed on to the controller is drained there.
                grace_s = max(LAST_WORDS_S, drain_until_s - clock.monotonic_s())
                server.stop(at_once=shutdown.forced, grace_s=grace_s)
                await asyncio.wait([serve_task])
            await _wait_peers_left(peer_readers, shutdown, drain_until_s - clock.monotonic_s())
        serve_task.result()
    return 0


async def _wait_retire_or_stop(shutdown: Shutdown) -> bool:
    """Waits until this worker is retired or the gateway is shut down; returns whether it is retired."""
    retired = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(RETIRE, retired.set)
    tasks = [asyncio.create_task(retired.wait()), asyncio.create_task(shutdown.wait_requested())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return retired.is_set()
    finally:
        for task in tasks:
            task.cancel()


async def _wait_peers_left(readers: PeerReaders, shutdown: Shutdown, grace_s: float) -> None:
    """Waits until no other process reads an answer of this worker, the time is over, or a second signal comes."""
    tasks = [asyncio.create_task(readers.wait_left()), asyncio.create_task(shutdown.wait_forced())]
    try:
        await asyncio.wait(tasks, timeout=max(0.0, grace_s), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class SnapshotFeed:
    """Passes the snapshots of the controller on to the parts of the worker that use them.

    Attributes:
        first_snapshot: Future of the first snapshot.
    """

    def __init__(self) -> None:
        self.first_snapshot: asyncio.Future[ControllerSnapshot] = asyncio.get_running_loop().create_future()
        self._last_snapshot: ControllerSnapshot | None = None
        self._listeners: list[Callable[[ControllerSnapshot], None]] = []

    def on_snapshot(self, snapshot: ControllerSnapshot) -> None:
        """Passes a snapshot on to all listeners."""
        self._last_snapshot = snapshot
        if not self.first_snapshot.done():
            self.first_snapshot.set_result(snapshot)
        for listener in self._listeners:
            listener(snapshot)

    def add_listener(self, listener: Callable[[ControllerSnapshot], None]) -> None:
        """Calls `listener` with the last snapshot, which may have come while it was made, and with each later one."""
        self._listeners.append(listener)
        if self._last_snapshot is not None:
            listener(self._last_snapshot)


class RequestReporter:
    """Reports the end of each request to the controller. Implements `maitred.core.context.RequestObserver`.

    Args:
        controller: The client of the controller.
    """

    def __init__(self, controller: ControllerClient) -> None:
        self._controller = controller
        self._forwarded: set[int] = set()

    def exclude(self, context: RequestContext) -> None:
        """Excludes a forwarded request, which the controller reports itself."""
        self._forwarded.add(id(context))

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Reports ended requests, except those that were forwarded."""
        for context in contexts:
            if id(context) in self._forwarded:
                self._forwarded.discard(id(context))
            else:
                self._controller.send_soon(encode_context(context))


class WorkerApp:
    """The ASGI application of a worker: serves local routes itself and forwards all others to the controller.

    Args:
        app: The application of this worker.
        route_table: The routes of that application.
        proxy: Forwards requests to the controller.
    """

    def __init__(self, app: GatewayApp, route_table: RouteTable, proxy: ControllerProxy) -> None:
        self._app = app
        self._local_routes = {(route.method, route.path) for route in route_table.routes}
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI request here, or forwards it; requests with an `Idempotency-Key` are always forwarded."""
        is_local = (scope["method"], scope["path"]) in self._local_routes
        if is_local and not any(name == b"idempotency-key" for name, _ in scope["headers"]):
            _ASGI_REQUEST.set((scope, send))
            await self._app(scope, receive, send)
        else:
            await self._proxy(scope, receive, send)


def _local_routes(
    config: Config, pipeline: WorkerPipeline, proxy: ControllerProxy, reporter: RequestReporter, clock: Clock
) -> list[Route]:
    strict, heartbeat_s = config.server.strict, config.server.heartbeat_s
    routes = [
        *ChatRoutes(pipeline, strict=strict, heartbeat_s=heartbeat_s).routes(),
        *CompletionRoutes(pipeline, strict=strict, heartbeat_s=heartbeat_s).routes(),
        *MessagesRoutes(pipeline, strict=strict, heartbeat_s=heartbeat_s).routes(),
    ]
    local_routes = [
        with_fields(route, handler=_with_forwarding(route.handler, proxy, reporter))
        for route in routes
        if route.idempotent
    ]
    if (headers := litellm_headers(config, clock)) is not None:
        local_routes = [headers.guard(route) for route in local_routes]
    return [*local_routes, LIVE]


def _with_forwarding(
    handler: Handler, proxy: ControllerProxy, reporter: RequestReporter
) -> Callable[[HttpExchange], Awaitable[None]]:
    """Wraps a handler: a request that it does not serve itself is forwarded to the controller as it came."""

    async def handle(exchange: HttpExchange) -> None:
        try:
            await handler(exchange)
        except ForwardToController:
            reporter.exclude(exchange.context)
            scope, send = _ASGI_REQUEST.get()
            exchange.state = ResponseState.COMPLETE
            # The body has been decompressed.
            headers = [header for header in scope["headers"] if header[0] != b"content-encoding"]
            exchange.status = await proxy.forward({**scope, "headers": headers}, exchange.body, send)

    return handle


async def _open_identity(
    config: Config,
    controller: ControllerClient,
    in_flight: InFlightLimiter,
    snapshot_feed: SnapshotFeed,
    clock: Clock,
    stack: AsyncExitStack,
) -> Identity:
    """Opens the authentication of this worker, which follows the controller's directory."""
    directory = Directory()
    settings = config.identity
    refresher = DirectoryRefresher(
        controller, directory, clock, every_s=settings.refresh_s, max_stale_s=min(settings.max_stale_s, _MAX_STALE_S)
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
    follower = DirectoryFollower(refresher, directory, controller, lambda: in_flight.cancel_revoked(identity.holds))
    snapshot_feed.add_listener(follower.on_snapshot)
    await stack.enter_async_context(running(follower.run(), "directory updates"))
    return identity


class DirectoryFollower:
    """Keeps the directory of a worker as new as that of its controller.

    Args:
        refresher: Reads changes into the directory.
        directory: The directory of this worker.
        controller: The client of the controller, which waits for the acknowledged version.
        cancel_revoked: Cancels the requests of principals that have lost access.
    """

    def __init__(
        self,
        refresher: DirectoryRefresher,
        directory: Directory,
        controller: ControllerClient,
        cancel_revoked: Callable[[], object],
    ) -> None:
        self._refresher = refresher
        self._directory = directory
        self._controller = controller
        self._changed = asyncio.Event()
        self._cancel_revoked = cancel_revoked
        refresher.watch(cancel_revoked)

    def on_snapshot(self, snapshot: ControllerSnapshot) -> None:
        """Wakes the follower: the snapshot may name a new version of the directory."""
        self._changed.set()

    async def run(self) -> None:
        """Follows the controller's directory until the task is cancelled."""
        async with running(self._refresher.run(), "directory refresh"):
            while True:
                self._controller.send(DirectoryAck(self._directory.version))
                await self._changed.wait()
                self._changed.clear()
                with suppress(StoreUnavailable):
                    await self._refresher.load()
                self._cancel_revoked()


async def _open_pipeline(
    config: Config,
    controller: ControllerClient,
    snapshot_feed: SnapshotFeed,
    clock: Clock,
    stack: AsyncExitStack,
) -> tuple[WorkerPipeline, PeerReaders]:
    """Opens the pipeline with its upstreams, engines and flow controller, and the readers of its answers in peers."""
    upstreams = await stack.enter_async_context(
        open_upstreams(config.models, config.health, make_status=_make_upstream_status)
    )
    models: list[AnyModel] = [*upstreams.models]
    endpoints_by_name: dict[str, dict[str, AnyEndpoint]] = {
        pool: {endpoint.name: endpoint for endpoint in pool_endpoints}
        for pool, pool_endpoints in upstreams.endpoints().items()
    }
    submission_ackers: dict[str, dict[str, SubmissionAcker]] = {}
    local: LocalModel | None = None
    if config.has_engine:
        engines = await stack.enter_async_context(await _open_engines(config, controller, clock))
        snapshot_feed.add_listener(engines.on_snapshot)
        # Whether a request may wait is decided by the controller.
        local = local_model(
            config, engines.engines, lambda: not config.model.attached, lambda: engines.pool_stays_ready
        )
        models.append(local.model)
        endpoints_by_name[local.name] = engines.endpoints
        submission_ackers[local.name] = engines.submission_ackers
    local_pools = locally_served_pools(config, None if local is None else local.name)
    flow_controller = RemoteFlowController(
        controller,
        endpoints=endpoints_by_name,
        submission_ackers=submission_ackers,
        config=config.admission,
        recoveries=config.dispatch.recoveries,
    )
    catalog = Catalog(models)
    routes = read_routes(config, catalog)
    local_names = LocalModelNames(routes, local_pools)

    def apply_update(update: ControllerSnapshot) -> None:
        local_names.rollout_names = update.rollout_names
        for pool, context_tokens in update.context_tokens_by_pool.items():
            for endpoint in endpoints_by_name.get(pool, {}).values():
                endpoint.replica.reported_context_tokens = context_tokens

    snapshot_feed.add_listener(apply_update)
    grammars = await stack.enter_async_context(GrammarValidator(config.admission.grammars))
    budget = RetryBudget(config.server.retry_share, config.server.retry_allowance)
    cache = AnswerCache(config.cache, RemoteBackend(controller), clock)
    peers = WorkerPeers(controller)
    sharing = AnswerSharing(cache, peers)
    readers = peers.serve(sharing)
    stack.push_async_callback(readers.close)
    pipeline = WorkerPipeline(
        Router(catalog, routes),
        flow_controller,
        clock=clock,
        bounds=RequestBounds(
            config.model.max_choices, config.model.max_prompt_logprobs, min_itl_s=config.dispatch.least_itl_s
        ),
        retry_policy=RetryPolicy(config.dispatch.retries, budget, clock),
        grammars=grammars,
        sharing=sharing,
    )
    pipeline.local_names = local_names
    return pipeline, readers


def _make_upstream_status(upstream: "UpstreamReplica") -> RemoteUpstreamStatus:
    return RemoteUpstreamStatus(upstream.name, upstream.config.probe_every_s)


async def _open_engines(config: Config, controller: ControllerClient, clock: Clock) -> WorkerEngines:
    """Opens this worker's own connections to the engines that the controller has."""
    fingerprint_check = FingerprintCheck(await asyncio.to_thread(fingerprint_of, find_model(config.model.folder)))

    def make_engine(address: str) -> RemoteEngine:
        if not config.model.starts_here:
            return make_remote_engine(parse_address(address), config.engine_link, fingerprint_check.check)
        return RemoteEngine(parse_address(address), silence_timeout_s=config.engine_link.silence_timeout_s)

    region = config.model.region or config.region
    return WorkerEngines(make_engine, controller, config.server.unread_tokens, clock, region=region)
