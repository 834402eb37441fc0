"""All routes of the HTTP API, put together."""

from collections.abc import Callable, Iterable, Sequence

from maitred.api.chat import ChatRoutes
from maitred.api.completions import CompletionRoutes
from maitred.api.config import ServerConfig
from maitred.api.edge import Edge
from maitred.api.gate import Gate
from maitred.api.models import ModelRoutes
from maitred.api.routes import Route, RouteTable
from maitred.api.service import ServiceRoutes
from maitred.core.answer import Answering, Observer
from maitred.core.clock import Clock
from maitred.core.tenancy import Identifying


def build(
    config: ServerConfig,
    answering: Answering,
    identity: Identifying,
    gate: Gate,
    observers: Sequence[Observer],
    render_metrics: Callable[[], bytes],
    clock: Clock,
    *,
    admin: Iterable[Route] = (),
) -> Edge:
    """The application for an HTTP server.

    Args:
        config: Limits.
        answering: The system behind the API.
        identity: Tells who calls.
        gate: Who may come in; its owner drains it.
        observers: Told of every ended request.
        render_metrics: Everything in Prometheus' text format.
        clock: For the times in tallies.
        admin: Routes of the administration, where there is a store to administer.
    """
    service = ServiceRoutes(answering, gate, render_metrics)
    routes = [
        *ModelRoutes(answering, strict=config.strict).routes(),
        *ChatRoutes(answering, strict=config.strict).routes(),
        *CompletionRoutes(answering, strict=config.strict).routes(),
        *admin,
        *service.routes(),
    ]
    service.describe(routes)
    return Edge(
        RouteTable(routes),
        identity,
        gate,
        observers,
        answering.standing,
        max_body_bytes=config.max_body_bytes,
        body_timeout_s=config.body_timeout_s,
        clock=clock,
    )
