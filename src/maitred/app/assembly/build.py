"""From a configuration to a regime: the way of a request, put together on the parts that stay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maitred.admission.policy.ladder import DegradationLadder
from maitred.api.admin.routes import administration
from maitred.api.application import build
from maitred.api.feedback import FeedbackRoutes
from maitred.app.admin.caller_usage import CallerUsage
from maitred.app.assembly.console import open_console
from maitred.app.assembly.generation import ConfigGeneration
from maitred.app.assembly.services import GatewayServices
from maitred.app.models.local import LocalModel
from maitred.app.models.registry import EngineRegistry
from maitred.app.models.router import Router, routes_of
from maitred.app.models.upstreams import UpstreamModels
from maitred.app.request.embeddings import Embedder
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.pipeline import Pipeline
from maitred.app.request.retry_policy import RetryPolicy
from maitred.config.tree import Config
from maitred.core.answer import RequestObserver
from maitred.dispatch.request import AnyEndpoint
from maitred.observe.logs import RequestLog
from maitred.observe.metrics.requests import RequestMetrics
from maitred.routing.catalog import Catalog
from maitred.routing.rollout.live import LiveRollouts


@dataclass(frozen=True, slots=True)
class GenerationDraft:
    """What a regime will be, before any part has been told of it.

    Attributes:
        config: What it is made from.
        served: What servers of others run.
        router: The names, and where they lead.
        posts: Where requests for each model that generates can go.
        ladders: Model -> what is tried before a request for it is refused.
    """

    config: Config
    served: UpstreamModels
    router: Router
    posts: Mapping[str, Sequence[AnyEndpoint]]
    ladders: Mapping[str, DegradationLadder]


def draft_of(
    config: Config,
    served: UpstreamModels,
    roster: EngineRegistry,
    local: LocalModel | None,
    live: LiveRollouts,
    requests: RequestMetrics,
) -> GenerationDraft:
    """Makes it; changes nothing for anybody.

    Raises:
        ConfigInvalid: Two models have one name.
    """
    roster.check(config)
    catalog = Catalog([*served.models, *roster.models])
    steps = {name: model.degradation for name, model in config.models.items()}
    if local is not None:
        steps[local.name] = config.model.degradation
    ladders = {name: DegradationLadder(each, skipped=requests.degradation_skipped) for name, each in steps.items()}
    router = Router(catalog, routes_of(config, catalog), live)
    return GenerationDraft(config, served, router, {**served.posts(), **roster.posts}, ladders)


def regime_of(draft: GenerationDraft, parts: GatewayServices) -> ConfigGeneration:
    """Makes it, once the parts have been told."""
    config, ground, clock = draft.config, parts.ground, parts.clock
    stores, access, metrics = ground.stores, ground.access, parts.metrics
    admission = parts.admission.as_now()
    dispatchers = dict(parts.queues.all)
    control = LocalFlowController(dispatchers, admission, clock)
    pipeline = Pipeline(
        draft.router,
        control,
        draft.ladders,
        clock,
        max_choices=config.model.max_choices,
        least_itl_s=config.dispatch.least_itl_s,
        retries=RetryPolicy(config.dispatch.retries, parts.retry_budget, clock),
        schemas=ground.schemas,
        trials=parts.trials,
        grammars=ground.grammars,
    )
    console_routes, identity = open_console(
        config.console, access.identity, parts.sessions, CallerUsage(stores.usage, admission, clock)
    )
    traces = ground.traces
    watching: list[RequestObserver] = [parts.digest, RequestLog(), *([] if traces is None else [traces])]
    edge = build(
        config.server,
        pipeline,
        identity,
        parts.gate,
        watching,
        metrics.render,
        clock,
        embedding=Embedder(draft.router, dispatchers, admission, clock),
        feedback=FeedbackRoutes(stores.feedback, metrics.feedback.given).routes(),
        admin=administration(
            *(stores.directory, stores.usage, admission.budgets, parts.desk.load, parts.replicas, parts.rollouts),
            *(parts.sleepers.loadables, parts.sleepers, parts.pins, parts.stories),
            *(parts.live_state, parts.reloader, parts.staff),
            *(access.identity.holds, clock),
        ),
        console=console_routes,
        answers=parts.answers,
        stores_up=parts.accounts.stores_up,
        check_stores=parts.accounts.check_stores,
        retry_budget=parts.retry_budget,
        begin=None if traces is None else traces.begin,
    )
    return ConfigGeneration(config, edge, draft.served, [*draft.posts], control, watching)
