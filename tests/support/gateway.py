"""A whole gateway in the test's own event loop: real HTTP and real engine sockets, but a scripted engine.

What a test needs to see (who is inside, which streams are open, how each request ended) is right there; the same
thing as a process of its own is `tests.support.scripted_gateway`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import msgspec

from maitred.admission.admission import Admission
from maitred.admission.config import AdmissionConfig
from maitred.api.config import ServerConfig
from maitred.api.http.server import HttpServer
from maitred.api.in_flight import InFlightLimiter
from maitred.api.responses.websocket import ResponsesWebSockets
from maitred.api.routes import Route
from maitred.app.address import bind, format_url
from maitred.app.models.router import Router
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.cache.config import IdempotencyConfig
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.clock import Clock, SystemClock
from maitred.core.cohort import COHORT
from maitred.core.context import RequestContext, RequestObserver
from maitred.core.limits import Limit
from maitred.core.replica import ModelCard
from maitred.core.tenancy import ANONYMOUS
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from maitred.observe.metrics.engines import EngineState
from maitred.observe.metrics.registry import Metrics
from maitred.replica.engine.client import EngineClient
from maitred.routing.catalog import Catalog, ServedModel
from maitred.store.counters.memory import MemoryCounters
from maitred.testing.script import ECHO, SCRIPTED_CARD, ScriptedAnswer
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.text.tokenizer import Tokenizer
from tests.support.admission_services import Limits, PaperLedger
from tests.support.applications import make_app

TOKENIZER = Tokenizer.load(BUNDLED_MODEL, cache_bytes=1 << 20)
MODEL = "tiny"
CARD = msgspec.structs.replace(SCRIPTED_CARD, vocab_size=TOKENIZER.vocab_size, context_tokens=512)


class Anyone:
    """Knows everybody, as the same one."""

    def __init__(self, principal=ANONYMOUS):
        self._principal = principal

    async def identify(self, header):
        return self._principal

    def is_still_valid(self, principal, header):
        return principal is self._principal


@dataclass
class Gateway:
    """Everything a test may want to look at."""

    url: str
    engine: ScriptedEngine
    link: EngineClient
    gate: InFlightLimiter
    metrics: Metrics
    client: httpx.AsyncClient
    kept: MemoryIdempotencyStore
    admission: Admission
    ledger: PaperLedger
    server: HttpServer
    dispatcher: Dispatcher
    websockets: ResponsesWebSockets
    contexts: list[RequestContext] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def on_request_end(self, context: RequestContext) -> None:
        self.contexts.append(context)
        self._news.set()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Waits for something to become true of the gateway."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                try:
                    async with asyncio.timeout(0.01):
                        await self._news.wait()
                except TimeoutError:
                    pass

    async def chat(self, **fields: object) -> httpx.Response:
        """A chat completion with a short conversation."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 8, **fields}
        return await self.client.post("/v1/chat/completions", json=body)


@asynccontextmanager
async def gateway(
    answers: Sequence[ScriptedAnswer] | Callable[..., ScriptedAnswer] = (ECHO,),
    *,
    step_s: float = 0.0,
    idempotency: IdempotencyConfig | None = None,
    limited: Sequence[Limit] = (),
    recoveries: int = 0,
    admitting: AdmissionConfig = AdmissionConfig(),  # noqa: B008 - frozen
    tokenizer: Tokenizer = TOKENIZER,
    card: ModelCard = CARD,
    clock: Clock | None = None,
    further: Callable[[Pipeline], Sequence[Route]] = lambda _: (),
    kept: MemoryIdempotencyStore | None = None,
    gate: InFlightLimiter | None = None,
    **limits: object,
) -> AsyncIterator[Gateway]:
    """A gateway on a free port with one scripted engine."""
    config = msgspec.structs.replace(ServerConfig(port=0), **limits)
    listener = bind(config)
    gate = InFlightLimiter(config.max_in_flight) if gate is None else gate
    clock = clock or SystemClock()
    async with ScriptedEngine(answers, card=card, step_s=step_s) as engine:
        link = EngineClient(engine.address)
        link.pause_at_tokens = config.unread_tokens
        await link.connect(timeout_s=300)
        model = ServedModel(MODEL, [link], tokenizer)
        metrics = Metrics(
            lambda: gate.count, lambda: {(MODEL, "local"): EngineState(link.is_ready, 0, link.load(), CARD)}
        )
        if kept is None:
            kept = MemoryIdempotencyStore(idempotency or IdempotencyConfig(), clock)
        async with httpx.AsyncClient(base_url=format_url(listener), timeout=300) as client:
            ledger = PaperLedger()
            admission = Admission(Limits(*limited), MemoryCounters(clock), ledger, admitting, clock)
            dispatcher = Dispatcher(MODEL, [Endpoint("local", link)], DispatchConfig(recoveries=recoveries), clock)
            pipeline = Pipeline(
                Router(Catalog([model])), LocalFlowController({MODEL: dispatcher}, admission, clock), clock=clock
            )
            observers: list[RequestObserver] = [metrics.requests]
            websockets = ResponsesWebSockets(config, gate, clock)
            edge = make_app(
                config,
                pipeline,
                Anyone(),
                gate,
                clock,
                observers=observers,
                render_metrics=metrics.render,
                answers=kept,
                further=[*further(pipeline), *websockets.routes()],
            )
            server = HttpServer(edge, stall_grace_s=config.stall_grace_s)
            system = Gateway(
                *(
                    format_url(listener),
                    engine,
                    link,
                    gate,
                    metrics,
                    client,
                    kept,
                    admission,
                    ledger,
                    server,
                    dispatcher,
                    websockets,
                )
            )
            observers.append(system)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            try:
                yield system
            finally:
                gate.cancel_all()
                server.stop(at_once=True)
                await serving
                link.close()
                assert COHORT.empty


def tokens_of(text: str) -> list[int]:
    """The text as the scripted engine must send it."""
    return TOKENIZER.encode(text, add_special_tokens=False)
