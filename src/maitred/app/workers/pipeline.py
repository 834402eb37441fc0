"""Which requests a worker serves by itself, and which it passes on to the controller, which can do all that there is.

A worker takes what nearly all requests are: those to a model that is there, whose way depends on nothing but itself.
What is decided across requests stays in one place: repeats of a request (`Idempotency-Key`), versions on trial, models
that come and go, choices among models, ladders whose steps depend on the queue, copies for late answers.
"""

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager

from maitred.app.request.pipeline import Pipeline
from maitred.config.tree import Config
from maitred.core.answer import InferenceRequest, RequestContext, ResponseStream
from maitred.routing.pools.config import RoutesConfig
from maitred.routing.pools.names import ModelNames


class ForwardToController(Exception):
    """The controller is to answer this."""


class WorkerPipeline(Pipeline):
    """The pipeline of a worker; raises `ForwardToController` for what is not its own.

    The arguments are those of `Pipeline`.

    Attributes:
        own: Tells which names it serves.
    """

    own: "LocalModelNames"

    def answer(self, ask: InferenceRequest, tally: RequestContext) -> AbstractAsyncContextManager[ResponseStream]:
        """See `Answering.answer`."""
        if not self.own.serves(ask.model):
            raise ForwardToController
        return super().answer(ask, tally)


class LocalModelNames:
    """The names whose requests a worker serves.

    Args:
        routes: The table of names, as far as the worker knows the models behind them.
        pools: Models that it can reach.

    Attributes:
        on_trial: Names behind which versions are tried now.
    """

    def __init__(self, routes: RoutesConfig, pools: Collection[str]) -> None:
        self._names = ModelNames(routes)
        self._routes = routes
        self._pools = pools
        self.on_trial: frozenset[str] = frozenset()

    def serves(self, name: str) -> bool:
        """Whether wherever a request to that name may go is within reach."""
        found = self._names.find(name)
        if found is None or self._names.is_auto(name) or self._names.canonical(name) in self.on_trial:
            return False
        targets = [*found.targets]
        if (chains := self._routes.fallbacks.get(found.name)) is not None:
            for each in (*chains.general, *chains.context_length, *chains.content_policy):
                behind = self._names.find(each)
                if behind is None:
                    return False
                targets += behind.targets
        return all(pool in self._pools for pool, _ in targets)


def within_reach(config: Config, local: str | None) -> set[str]:
    """The models that a worker can serve.

    Args:
        config: The settings.
        local: The name of the model of the `model` section; None: there is none.
    """
    if config.traces.endpoint is not None and config.traces.content:
        return set()  # what was said goes into spans, and these are made by the controller
    pools = {name for name, model in config.models.items() if model.upstreams and not model.degradation}
    if local is not None and not config.model.degradation:
        pools.add(local)
    return pools - {*config.dispatch.hedging.models}
