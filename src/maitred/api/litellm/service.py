"""Routes of LiteLLM's `/model/info`, `/health/*` and `/cache/ping`."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from maitred import __version__
from maitred.admission.prices import PriceList
from maitred.api.admin.service import CacheService, ReplicaService
from maitred.api.exchange import HttpExchange
from maitred.api.litellm.dialect import answer, litellm_route
from maitred.api.routes import Route
from maitred.core.errors import ReplicaUnavailable, Unauthenticated, Unavailable
from maitred.core.service import InferenceService
from maitred.core.tenancy import Authenticator, Principal
from maitred.core.tenancy import Scope as KeyScope
from maitred.core.usage import NANO, PRICED_TOKENS
from maitred.wire.admin.decode import decode_query
from maitred.wire.litellm.requests import ModelQuery, NoQuery

Readiness = Callable[[], str]
"""Returns ``ok`` or ``degraded`` if requests can run, else why they cannot."""


class LitellmServiceRoutes:
    """Routes of models, health and the cache.

    Args:
        answering: The inference service behind the API.
        prices: The prices of all models.
        replicas: The replicas of this gateway.
        cache: The cache of answers.
        identity: Identifies a caller of `/health`, who sees no names without a key.
        readiness: Tells whether requests can run.
    """

    def __init__(
        self,
        answering: InferenceService,
        prices: PriceList,
        replicas: ReplicaService,
        cache: CacheService,
        identity: Authenticator,
        readiness: Readiness,
    ) -> None:
        self._answering = answering
        self._prices = prices
        self._replicas = replicas
        self._cache = cache
        self._identity = identity
        self._readiness = readiness

    def routes(self) -> list[Route]:
        """Returns the routes; `/health` takes the place of ours, and says what that says."""
        needs = KeyScope.INFERENCE
        return [
            litellm_route("GET", "/model/info", self.models, query=ModelQuery, needs=needs),
            litellm_route("GET", "/v1/model/info", self.models, query=ModelQuery, needs=needs),
            litellm_route("GET", "/health", self.health, needs=None),
            litellm_route("GET", "/health/liveliness", self.live, needs=None),
            litellm_route("GET", "/health/liveness", self.live, needs=None),
            litellm_route("GET", "/health/readiness", self.ready, needs=None),
            litellm_route("GET", "/cache/ping", self.ping, query=NoQuery, needs=KeyScope.INFERENCE),
        ]

    async def models(self, exchange: HttpExchange) -> None:
        """Answers with the models that the caller may use, their windows and their prices."""
        query = decode_query(exchange.query, ModelQuery)
        data = [self._model(exchange.principal, name) for name in self._answering.models(exchange.principal)]
        wanted = query.litellm_model_id
        await answer(exchange, {"data": [each for each in data if wanted in (None, each["model_info"]["id"])]})

    async def live(self, exchange: HttpExchange) -> None:
        """Answers that the process is alive."""
        await answer(exchange, "I'm alive!")

    async def ready(self, exchange: HttpExchange) -> None:
        """Answers whether requests can run."""
        status = self._readiness()
        is_ready = status in ("ok", "degraded")
        database = "disconnected" if status in ("degraded", "no_store") else "connected"
        body = {"status": "healthy" if is_ready else status, "db": database, "maitred_version": __version__}
        await answer(exchange, body, status=200 if is_ready else 503)

    async def health(self, exchange: HttpExchange) -> None:
        """Answers with the replicas that are ready and those that are not, with names for whoever has a key."""
        status = self._readiness()
        caller: Principal | None = None
        with suppress(Unauthenticated, Unavailable):
            caller = await self._identity.identify(exchange.header)
        visible = [] if caller is None else [each for each in self._replicas.all() if caller.may_use(each.model)]
        lists: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for each in visible:
            fault = {} if each.ready else {"error": each.outage or each.state}
            lists[each.ready].append({"model": each.model, "model_id": each.replica, **fault})
        counts = [each.ready for each in self._replicas.all()]
        body = {
            "status": status,
            "healthy_endpoints": lists[True],
            "unhealthy_endpoints": lists[False],
            "healthy_count": sum(counts),
            "unhealthy_count": len(counts) - sum(counts),
        }
        await answer(exchange, body, status=200 if status in ("ok", "degraded") else 503)

    async def ping(self, exchange: HttpExchange) -> None:
        """Answers whether the cache of answers works."""
        decode_query(exchange.query, NoQuery)
        state = await self._cache.describe()
        body = {
            "status": "healthy",
            "cache_type": state.store.backend,
            "ping_response": True,
            "set_cache_response": None,
        }
        await answer(exchange, body)

    def _model(self, principal: Principal, name: str) -> dict[str, Any]:
        price = self._prices.price_for(name).price
        window: int | None = None
        dimensions = 0
        with suppress(ReplicaUnavailable):
            card = self._answering.card(principal, name)
            window, dimensions = card.context_tokens, card.embedding_dimensions
        return {
            "model_name": name,
            "litellm_params": {"model": name},
            "model_info": {
                "id": name,
                "key": name,
                "db_model": False,
                "mode": "embedding" if dimensions else "chat",
                "max_tokens": window,
                "max_input_tokens": window,
                "max_output_tokens": window,
                "input_cost_per_token": price.prompt / PRICED_TOKENS / NANO,
                "output_cost_per_token": price.output / PRICED_TOKENS / NANO,
                "cache_read_input_token_cost": price.cached / PRICED_TOKENS / NANO,
            },
        }
