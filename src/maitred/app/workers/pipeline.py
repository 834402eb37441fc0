"""Decides which requests a worker serves itself, and which it forwards to the controller.

A worker serves what nearly all requests are: requests to a model that is always served, and whose route depends on
nothing but the request itself. What is decided across requests stays in the controller: repeated requests
(`Idempotency-Key`), canary rollouts, models that are loaded on demand, automatic model selection, degradation that
depends on the queue, hedged requests, and models whose cached answers are shared by similar questions.
"""

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager

from maitred.app.request.pipeline import Pipeline
from maitred.config.tree import Config
from maitred.core.context import RequestContext
from maitred.core.inference import InferenceRequest
from maitred.core.service import ResponseStream
from maitred.routing.pools.config import RoutesConfig
from maitred.routing.pools.names import NameResolver


class ForwardToController(Exception):
    """Signals that the controller has to serve this request."""


class WorkerPipeline(Pipeline):
    """The pipeline of a worker; raises `ForwardToController` for a request that it does not serve.

    The arguments are those of `Pipeline`.

    Attributes:
        local_names: Knows which model names this worker serves.
    """

    local_names: "LocalModelNames"

    def generate(
        self, request: InferenceRequest, context: RequestContext
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Generates the response to a request. Raises `ForwardToController` for a name that is not local."""
        if not self.local_names.serves(request.model):
            raise ForwardToController
        return super().generate(request, context)


class LocalModelNames:
    """The model names whose requests a worker serves itself.

    Args:
        routes: The table of names, as far as the worker knows the models behind them.
        pools: The models whose requests a worker can serve itself; see `locally_served_pools`.

    Attributes:
        rollout_names: Names with a rollout in progress.
    """

    def __init__(self, routes: RoutesConfig, pools: Collection[str]) -> None:
        self._names = NameResolver(routes)
        self._routes = routes
        self._pools = pools
        self.rollout_names: frozenset[str] = frozenset()

    def serves(self, name: str) -> bool:
        """Whether this worker can serve every model to which a request for that name may be routed."""
        entry = self._names.resolve(name)
        if entry is None or self._names.is_auto(name) or self._names.canonical(name) in self.rollout_names:
            return False
        targets = [*entry.targets]
        if (chains := self._routes.fallbacks.get(entry.name)) is not None:
            for fallback in (*chains.general, *chains.context_length, *chains.content_policy):
                fallback_entry = self._names.resolve(fallback)
                if fallback_entry is None:
                    return False
                targets += fallback_entry.targets
        return all(pool in self._pools for pool, _ in targets)


def locally_served_pools(config: Config, engine_model: str | None) -> set[str]:
    """Returns the models whose requests a worker can serve itself.

    Args:
        config: The settings.
        engine_model: The name of the model of the `model` section, which engines of this gateway run; None: there is
            none.
    """
    if config.traces.endpoint is not None and config.traces.content:
        return set()  # prompts and answers go into spans, which only the controller exports
    pools = {name for name, model in config.models.items() if model.upstreams and not model.degradation}
    if engine_model is not None and not config.model.degradation:
        pools.add(engine_model)
    return {pool for pool in pools if not config.cache.serves_similar(pool)} - {*config.dispatch.hedging.models}
