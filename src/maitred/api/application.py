"""Application of the HTTP API: all routes put together."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from maitred.admission.policy.retries import RetryBudget
from maitred.api.app import Begin, GatewayApp, RetryAdvisor
from maitred.api.chat import ChatRoutes
from maitred.api.completions import CompletionRoutes
from maitred.api.config import ServerConfig
from maitred.api.embeddings import EmbeddingRoutes
from maitred.api.health import ServiceRoutes
from maitred.api.idempotent import Idempotency
from maitred.api.in_flight import InFlightLimiter
from maitred.api.messages import MessagesRoutes
from maitred.api.models import ModelRoutes
from maitred.api.queue import QueueRoutes
from maitred.api.routes import Route, RouteTable
from maitred.cache.config import IdempotencyConfig
from maitred.cache.idempotency import AnswerStore
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.core.clock import Clock
from maitred.core.context import RequestObserver
from maitred.core.service import EmbeddingService, InferenceService
from maitred.core.tenancy import Authenticator


def build_app(
    config: ServerConfig,
    answering: InferenceService,
    identity: Authenticator,
    in_flight: InFlightLimiter,
    observers: Sequence[RequestObserver],
    render_metrics: Callable[[str], tuple[bytes, str]],
    clock: Clock,
    *,
    embedding: EmbeddingService | None = None,
    feedback: Iterable[Route] = (),
    admin: Iterable[Route] = (),
    console: Iterable[Route] = (),
    answers: AnswerStore | None = None,
    stores_up: Callable[[], Mapping[str, bool]] = dict,
    check_stores: Callable[[], None] = lambda: None,
    retry_budget: RetryBudget | None = None,
    begin: Begin | None = None,
) -> GatewayApp:
    """Builds the application for an HTTP server.

    Args:
        config: Settings of the HTTP server, such as its limits.
        answering: The inference service behind the API.
        identity: Identifies the caller of a request.
        in_flight: Limits the requests in flight; its owner drains it.
        observers: Observers that get every ended request.
        render_metrics: Returns all metrics and their content type, in a format that an `Accept` header asks for.
        clock: Clock for the times in request contexts.
        embedding: Computes embeddings; None: there is no route for embeddings.
        feedback: The feedback route; None: there is no usage ledger whose requests can be rated.
        admin: Routes of the administration; empty without a store to administer.
        console: Routes of the web console; empty without one. OpenAPI does not describe these routes.
        answers: Stores the responses of requests with an ``Idempotency-Key``; None: they are kept in memory.
        stores_up: Returns whether each store of the gateway answers.
        check_stores: Raises StoreUnavailable once requests are refused because a store does not answer.
        begin: See `GatewayApp`.
        retry_budget: Decides which refused requests may be retried; None: a budget with the configured settings.
    """
    service = ServiceRoutes(answering, in_flight, render_metrics, stores_up, check_stores)
    routes = [
        *ModelRoutes(answering, strict=config.strict).routes(),
        *ChatRoutes(answering, strict=config.strict, heartbeat_s=config.heartbeat_s).routes(),
        *CompletionRoutes(answering, strict=config.strict, heartbeat_s=config.heartbeat_s).routes(),
        *([] if embedding is None else EmbeddingRoutes(embedding, strict=config.strict).routes()),
        *MessagesRoutes(answering, strict=config.strict, heartbeat_s=config.heartbeat_s).routes(),
        *QueueRoutes(answering).routes(),
        *feedback,
        *admin,
        *service.routes(),
    ]
    service.describe(routes)
    if answers is None:
        answers = MemoryIdempotencyStore(IdempotencyConfig(), clock)
    idempotency = Idempotency(answers, answering.rate_limit_status, heartbeat_s=config.heartbeat_s)
    return GatewayApp(
        RouteTable([*map(idempotency.guard, routes), *console]),
        identity,
        in_flight,
        observers,
        answering.rate_limit_status,
        RetryAdvisor(retry_budget or RetryBudget(config.retry_share, config.retry_allowance), clock),
        begin=begin,
        max_body_bytes=config.max_body_bytes,
        body_timeout_s=config.body_timeout_s,
        clock=clock,
    )
