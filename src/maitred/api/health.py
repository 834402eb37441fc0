"""Routes for operators of the server: health, version, metrics and the API description.

These routes take no slot of the in-flight limit and work while the server drains, because a probe must see the server's
state.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from maitred import __version__
from maitred.api.exchange import HttpExchange
from maitred.api.in_flight import InFlightLimiter
from maitred.api.openapi import describe
from maitred.api.reference_page import CONTENT_SECURITY_POLICY, render
from maitred.api.routes import Route
from maitred.core.errors import StoreUnavailable
from maitred.core.service import InferenceService
from maitred.core.tenancy import Scope


class HealthStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Health of the server, with the reason if it cannot work."""

    status: str
    """``ok``, ``degraded`` (a store does not answer, and requests use the data that is known without it), ``draining``,
    ``no_replica``, or ``no_store`` (a store has not answered for too long)."""
    away: list[str] = []
    """The stores that do not answer."""


class VersionInfo(msgspec.Struct, frozen=True):
    """Version of maitred that runs here."""

    version: str


async def _live(exchange: HttpExchange) -> None:
    """Answers that the process is alive: the event loop runs."""
    await exchange.respond(msgspec.json.encode(HealthStatus("ok")))


LIVE = Route("GET", "/health/live", _live, "Whether the process responds at all.", returns=HealthStatus)


class ServiceRoutes:
    """Routes for health, version, metrics and the OpenAPI description.

    Args:
        answering: Tells whether a request could run.
        in_flight: Tells whether a new request would be accepted.
        render_metrics: Returns all metrics and their content type, in a format that an `Accept` header asks for.
        stores_up: Returns whether each store of the gateway answers.
        check_stores: Raises StoreUnavailable once requests are refused because a store does not answer.
    """

    def __init__(
        self,
        answering: InferenceService,
        in_flight: InFlightLimiter,
        render_metrics: Callable[[str], tuple[bytes, str]],
        *,
        stores_up: Callable[[], Mapping[str, bool]] = dict,
        check_stores: Callable[[], None] = lambda: None,
    ) -> None:
        self._answering = answering
        self._gate = in_flight
        self._render_metrics = render_metrics
        self._stores_up = stores_up
        self._check_stores = check_stores
        self._described: Iterable[Route] = ()
        self._description: bytes | None = None
        self._page: bytes | None = None

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route("GET", "/health", self.ready, "Whether requests can run now: 200 or 503.", returns=HealthStatus),
            LIVE,
            Route(
                "GET", "/health/ready", self.ready, "Whether requests can run now: 200 or 503.", returns=HealthStatus
            ),
            Route("GET", "/version", self.version, "The version of maitred.", returns=VersionInfo),
            Route("GET", "/", self.version, "As `/version`; a browser gets the console.", returns=VersionInfo),
            Route(
                "GET",
                "/metrics",
                self.metrics,
                "Metrics in Prometheus' text format, or as OpenMetrics to whoever accepts it.",
                content_type="text/plain",
                needs=Scope.METRICS,
            ),
            Route("GET", "/openapi.json", self.openapi, "This description.", content_type="application/json"),
            Route("GET", "/docs", self.docs, "This description, for browsers.", content_type="text/html"),
        ]

    def describe(self, routes: Iterable[Route]) -> None:
        """Sets the routes that `/openapi.json` describes; called once, when all routes are known."""
        self._described = routes

    async def ready(self, exchange: HttpExchange) -> None:
        """Answers whether a request that came now would be accepted and would run."""
        health = self.health()
        code = 200 if health.status in ("ok", "degraded") else 503
        await exchange.respond(msgspec.json.encode(health), status=code)

    def health(self) -> HealthStatus:
        """Returns whether a request that came now would be accepted and would run."""
        away = [store for store, up in self._stores_up().items() if not up]
        if self._gate.draining:
            return HealthStatus("draining", away)
        return HealthStatus(self._with_stores(away) if self._answering.ready() else "no_replica", away)

    def _with_stores(self, away: Sequence[str]) -> str:
        try:
            self._check_stores()
        except StoreUnavailable:
            return "no_store"
        return "degraded" if away else "ok"

    async def version(self, exchange: HttpExchange) -> None:
        """Answers with the version of maitred."""
        await exchange.respond(msgspec.json.encode(VersionInfo(__version__)))

    async def metrics(self, exchange: HttpExchange) -> None:
        """Answers a scrape with all metrics."""
        body, content_type = self._render_metrics(exchange.header(b"accept") or "")
        await exchange.respond(body, content_type=content_type.encode())

    async def docs(self, exchange: HttpExchange) -> None:
        """Answers with a page that shows the API; it is made on demand, like the description."""
        if self._page is None:
            self._page = await asyncio.to_thread(render, msgspec.json.decode(await self._describe()))
        policy = (b"content-security-policy", CONTENT_SECURITY_POLICY.encode())
        await exchange.respond(self._page, content_type=b"text/html; charset=utf-8", headers=[policy])

    async def openapi(self, exchange: HttpExchange) -> None:
        """Answers with the API description."""
        await exchange.respond(await self._describe())

    async def _describe(self) -> bytes:
        """Returns the API description, which is made on demand: it takes some tenths of a second."""
        if self._description is None:
            self._description = await asyncio.to_thread(describe, self._described)
        return self._description
