"""A gateway in the test's own event loop whose one model is run by another server: real HTTP on both sides."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from msgspec.structs import replace

from maitred.admission.admission import Admission
from maitred.admission.config import AdmissionConfig
from maitred.admission.policy.ladder import DegradationLadder
from maitred.admission.policy.retries import RetryBudget
from maitred.api.config import ServerConfig
from maitred.api.http.server import HttpServer
from maitred.api.in_flight import InFlightLimiter
from maitred.api.routes import Route
from maitred.app.address import bind, format_url
from maitred.app.admin.rollouts import RolloutAdmin
from maitred.app.models.router import Router, home_region, read_routes
from maitred.app.models.upstreams import open_upstreams
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.app.request.retry_policy import RetryPolicy
from maitred.app.request.rollout_observer import RolloutObserver
from maitred.config.tree import Config, TextModelConfig
from maitred.core.clock import Clock, SystemClock
from maitred.core.cohort import COHORT
from maitred.core.context import RequestContext
from maitred.core.flow import ServiceWeights
from maitred.core.limits import Limit
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.dispatch.config import DispatchConfig, ReportsConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.endpoint import EndpointState
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.replica import UpstreamReplica
from maitred.routing.balance.balancer import Balancer
from maitred.routing.balance.config import BalanceConfig
from maitred.routing.catalog import Catalog, TextModel
from maitred.routing.config import RoutingConfig
from maitred.routing.escalation.schemas import SchemaChecker
from maitred.routing.prefix import PrefixCacheBalancer
from maitred.routing.rollout.live import LiveRollouts
from maitred.store.counters.memory import MemoryCounters
from tests.support.admission_services import Limits, PaperLedger
from tests.support.applications import make_app
from tests.support.gateway import Anyone
from tests.support.rollout_store import PaperRollouts

MODEL = "far"
_TIMEOUTS = ("connect_timeout_s", "idle_timeout_s", "probe_timeout_s")
_DEFAULTS = UpstreamConfig(url="http://127.0.0.1/v1")


@dataclass
class UpstreamGateway:
    """Everything a test may want to look at."""

    url: str
    client: httpx.AsyncClient
    model: TextModel
    upstream: UpstreamReplica
    gate: InFlightLimiter
    dispatcher: Dispatcher
    ledger: PaperLedger
    admission: Admission
    rollouts: RolloutAdmin
    trials: RolloutObserver
    dispatchers: Sequence[Dispatcher] = ()
    contexts: list[RequestContext] = field(default_factory=list)

    def on_request_end(self, context: RequestContext) -> None:
        self.contexts.append(context)

    @property
    def nothing_left(self) -> bool:
        """Whether nobody holds anything any more."""
        held = sum(endpoint_state.credits.request_count for endpoint_state in self._endpoint_states)
        return (self.open_streams, self.gate.count, held) == (0, 0, 0)

    @property
    def open_streams(self) -> int:
        """To the servers of all models."""
        return sum(endpoint_state.endpoint.replica.open_streams for endpoint_state in self._endpoint_states)

    @property
    def _endpoint_states(self) -> list[EndpointState]:
        return [endpoint_state for dispatcher in self.dispatchers for endpoint_state in dispatcher.core.endpoint_states]

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)

    async def chat(self, **fields: object) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 8, **fields}
        return await self.client.post("/v1/chat/completions", json=body)


def _with_hang_guards(model: TextModelConfig) -> TextModelConfig:
    """The model, with minutes for what its test sets no time for: a busy machine loses no server and no answer."""
    return replace(
        model,
        upstreams=[
            replace(
                upstream,
                **{name: 300.0 for name in _TIMEOUTS if getattr(upstream, name) == getattr(_DEFAULTS, name)},
            )
            for upstream in model.upstreams
        ],
    )


@asynccontextmanager
async def upstream_gateway(
    url: str,
    *,
    model: TextModelConfig | None = None,
    limited: Sequence[Limit] = (),
    admitting: AdmissionConfig = AdmissionConfig(),  # noqa: B008 - frozen
    up: bool = True,
    retries: int = 0,
    allowance: int = 10,
    models: Mapping[str, TextModelConfig] | None = None,
    routing: RoutingConfig = RoutingConfig(),  # noqa: B008 - frozen
    principal: Principal = ANONYMOUS,
    schemas: SchemaChecker | None = None,
    reports: ReportsConfig = ReportsConfig(),  # noqa: B008 - frozen
    balance: BalanceConfig | None = None,
    dispatching: DispatchConfig = DispatchConfig(),  # noqa: B008 - frozen
    clock: Clock = SystemClock(),  # noqa: B008 - it holds nothing
    further: Callable[[Pipeline], Sequence[Route]] = lambda _: (),
    **settings: object,
) -> AsyncIterator[UpstreamGateway]:
    """A gateway on a free port.

    Args:
        url: Of the API behind it.
        model: Its configuration; by default one server with `settings`.
        limited: Limits of everybody.
        admitting: How requests are admitted.
        up: Whether to wait until the servers behind were found.
        retries: How often a request is tried again after a failure before its first part.
        allowance: Retries in a minute that a tenant has beside a share of its requests; 0: it has none at all.
        models: Several models instead of one.
        routing: The names that lead to them.
        principal: Who calls.
        schemas: Puts answers to their schemas.
        reports: How long what the servers say of their load is believed.
        balance: Which of several servers takes a request; None: the one with the most room.
        dispatching: How requests wait, and for whom.
        clock: By which they are dispatched and admitted.
        further: Routes beside those of inference.
        **settings: Of the upstream.
    """
    config = ServerConfig(port=0, heartbeat_s=60.0)
    listener = bind(config)
    gate = InFlightLimiter(config.max_in_flight)
    if model is None:
        model = TextModelConfig(upstreams=[UpstreamConfig(url=url, **{"dialect": "sglang", **settings})])
    served = {name: _with_hang_guards(each) for name, each in (models or {MODEL: model}).items()}
    system_config = Config(models=served, routing=routing)
    async with open_upstreams(system_config.models) as upstreams:
        text_model = upstreams.models[0]
        upstream = text_model.replicas[0]
        ledger = PaperLedger()
        admission = Admission(Limits(*limited), MemoryCounters(clock), ledger, admitting, clock)
        dispatchers = {
            name: Dispatcher(
                *(
                    name,
                    [dataclasses.replace(each, region=home_region(name, system_config)) for each in endpoints],
                    replace(dispatching, reports=reports),
                    clock,
                ),
                region=home_region(name, system_config),
                balancer=None
                if balance is None
                else PrefixCacheBalancer(Balancer(balance, ServiceWeights(), random.random)),
            )
            for name, endpoints in upstreams.endpoints().items()
        }
        dispatcher = dispatchers[text_model.name]
        catalog = Catalog(upstreams.models)
        live = LiveRollouts()
        router = Router(catalog, read_routes(system_config, catalog), live)
        rollouts = RolloutAdmin(PaperRollouts(), live, router.names, clock)
        await rollouts.open(routing.rollouts)
        ladders = {name: DegradationLadder(each.degradation) for name, each in system_config.models.items()}
        again = RetryPolicy(retries, RetryBudget(0.2 if allowance else 0.0, allowance), clock)
        trials = RolloutObserver(live, rollouts, clock)
        pipeline = Pipeline(
            router,
            LocalFlowController(dispatchers, admission, clock),
            ladders,
            clock,
            retry_policy=again,
            schemas=schemas,
            rollout_observer=trials,
        )
        observers = []
        edge = make_app(
            config, pipeline, Anyone(principal), gate, clock, observers=observers, further=further(pipeline)
        )
        server = HttpServer(edge, stall_grace_s=config.stall_grace_s)
        async with httpx.AsyncClient(base_url=format_url(listener), timeout=300) as client:
            system = UpstreamGateway(
                *(
                    format_url(listener),
                    client,
                    text_model,
                    upstream,
                    gate,
                    dispatcher,
                    ledger,
                    admission,
                    rollouts,
                    trials,
                ),
                [*dispatchers.values()],
            )
            observers.append(system)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            ticking = [
                asyncio.create_task(part.run()) for part in (*dispatchers.values(), rollouts, trials.shadow_traffic)
            ]
            while not server.started:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            try:
                if up:
                    servers = [server for model in upstreams.models for server in model.replicas]
                    await system.wait_until(lambda: all(server.status.is_up for server in servers))
                yield system
            finally:
                gate.cancel_all()
                server.stop(at_once=True)
                for task in ticking:
                    task.cancel()
                await serving
                await system.wait_until(lambda: COHORT.empty)  # a probe may be under way
