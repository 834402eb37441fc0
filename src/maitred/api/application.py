"""Application of the HTTP API: its routes put together, and what serves them."""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from maitred.admission.policy.retries import RetryBudget
from maitred.api.app import Begin, GatewayApp, RetryAdvisor
from maitred.api.chat import ChatRoutes
from maitred.api.completions import CompletionRoutes
from maitred.api.config import ServerConfig
from maitred.api.embeddings import EmbeddingRoutes
from maitred.api.health import ServiceRoutes
from maitred.api.idempotent import Idempotency
from maitred.api.in_flight import InFlightLimiter
from maitred.api.large_body import CheckLimits
from maitred.api.media.passthrough import PassthroughRoutes
from maitred.api.messages import MessagesRoutes
from maitred.api.models import ModelRoutes
from maitred.api.origin_policy import OriginPolicy
from maitred.api.queue import QueueRoutes
from maitred.api.routes import Route, RouteTable
from maitred.cache.config import IdempotencyConfig
from maitred.cache.idempotency import AnswerStore
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.core.clock import Clock
from maitred.core.context import RateLimitStatus, RequestContext, RequestObserver
from maitred.core.service import EmbeddingService, InferenceService, PassthroughService
from maitred.core.tenancy import Authenticator


def api_routes(
    config: ServerConfig,
    answering: InferenceService,
    service: ServiceRoutes,
    *,
    embedding: EmbeddingService | None = None,
    passing: PassthroughService | None = None,
    further: Iterable[Route] = (),
) -> list[Route]:
    """Returns the routes of the API, and lets ``/openapi.json`` describe them.

    Args:
        config: Settings of the HTTP server.
        answering: The inference service behind the API.
        service: The routes for operators of the server, with the API description.
        embedding: Computes embeddings; None: there is no route for embeddings.
        passing: Passes requests on to upstream servers; None: there are no routes for images and sound.
        further: Routes beside inference, such as feedback and administration.
    """
    passthrough = None
    if passing is not None:
        passthrough = PassthroughRoutes(passing, config.max_upload_bytes, config.upload_timeout_s)
    routes = [
        *ModelRoutes(answering, strict=config.strict).routes(),
        *ChatRoutes(answering, strict=config.strict, heartbeat_s=config.heartbeat_s).routes(),
        *CompletionRoutes(answering, strict=config.strict, heartbeat_s=config.heartbeat_s).routes(),
        *(
            []
            if embedding is None
            else EmbeddingRoutes(embedding, strict=config.strict, passthrough=passthrough).routes()
        ),
        *([] if passthrough is None else passthrough.routes()),
        *MessagesRoutes(answering, strict=config.strict, heartbeat_s=config.heartbeat_s).routes(),
        *QueueRoutes(answering).routes(),
        *further,
        *service.routes(),
    ]
    service.describe(routes)
    return routes


def build_app(
    config: ServerConfig,
    routes: Iterable[Route],
    identity: Authenticator,
    in_flight: InFlightLimiter,
    observers: Sequence[RequestObserver],
    rate_limit_status: Callable[[RequestContext], Awaitable[RateLimitStatus | None]],
    clock: Clock,
    *,
    answers: AnswerStore | None = None,
    retry_budget: RetryBudget | None = None,
    begin: Begin | None = None,
    check_limits: CheckLimits | None = None,
) -> GatewayApp:
    """Builds the application for an HTTP server.

    Args:
        config: Settings of the HTTP server, such as its limits.
        routes: All routes.
        identity: Identifies the caller of a request.
        in_flight: Limits the requests in flight; its owner drains it.
        observers: Observers that get every ended request.
        rate_limit_status: Returns how far a caller's limits are used; see `GatewayApp`.
        clock: Clock for the times in request contexts.
        answers: Stores the responses of requests with an ``Idempotency-Key``; None: they are kept in memory.
        retry_budget: Decides which refused requests may be retried; None: a budget with the configured settings.
        begin: See `GatewayApp`.
        check_limits: See `LargeBodyReader`.
    """
    if answers is None:
        answers = MemoryIdempotencyStore(IdempotencyConfig(), clock)
    idempotency = Idempotency(answers, rate_limit_status, heartbeat_s=config.heartbeat_s)
    return GatewayApp(
        RouteTable(map(idempotency.guard, routes)),
        identity,
        in_flight,
        observers,
        rate_limit_status=rate_limit_status,
        retries=RetryAdvisor(retry_budget or RetryBudget(config.retry_share, config.retry_allowance), clock),
        begin=begin,
        check_limits=check_limits,
        max_body_bytes=config.max_body_bytes,
        body_timeout_s=config.body_timeout_s,
        origin_policy=OriginPolicy(config),
        clock=clock,
    )
