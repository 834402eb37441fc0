"""Builder of configuration generations: it makes the request pipeline on the services that stay."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from maitred.admission.policy.ladder import DegradationLadder
from maitred.admission.prices import PriceList
from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.routes import admin_routes
from maitred.api.application import api_routes, build_app
from maitred.api.console import ConsoleRoutes, OwnUseBody
from maitred.api.feedback import FeedbackRoutes
from maitred.api.health import ServiceRoutes
from maitred.api.litellm.routes import litellm_routes
from maitred.api.responses.routes import ResponsesRoutes
from maitred.api.routes import Route
from maitred.app.admin.caller_usage import CallerUsage
from maitred.app.assembly.generation import ConfigGeneration
from maitred.app.assembly.services import GatewayServices
from maitred.app.models.local import LocalModel
from maitred.app.models.registry import EngineRegistry
from maitred.app.models.router import Router, read_routes
from maitred.app.models.upstreams import UpstreamModels, litellm_headers
from maitred.app.request.embeddings import Embedder
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.passthrough import Passthrough
from maitred.app.request.pipeline import Pipeline
from maitred.app.request.planner import RequestBounds
from maitred.app.request.retry_policy import RetryPolicy
from maitred.cache.embedding_cache import EmbeddingCache
from maitred.config.tree import Config
from maitred.console.config import ConsoleConfig
from maitred.console.pages import pages
from maitred.console.sessions import COOKIE, ConsoleSessions, same_origin
from maitred.core.context import RequestObserver
from maitred.core.tenancy import Principal
from maitred.dispatch.request import AnyEndpoint
from maitred.identity.identity import Identity
from maitred.observe.logs import RequestLog
from maitred.observe.metrics.requests import RequestMetrics
from maitred.routing.catalog import Catalog
from maitred.routing.rollout.live import LiveRollouts


@dataclass(frozen=True, slots=True)
class GenerationDraft:
    """Draft of a generation, made before any service is reconfigured.

    Attributes:
        config: The configuration of the generation.
        upstream_models: The models of upstream servers.
        router: The router of model names.
        endpoints: Model that generates -> the endpoints for its requests.
        ladders: Model -> the steps that are tried before a request for it is refused.
    """

    config: Config
    upstream_models: UpstreamModels
    router: Router
    endpoints: Mapping[str, Sequence[AnyEndpoint]]
    ladders: Mapping[str, DegradationLadder]


def draft_generation(
    config: Config,
    served: UpstreamModels,
    registry: EngineRegistry,
    local: LocalModel | None,
    live_rollouts: LiveRollouts,
    requests: RequestMetrics,
) -> GenerationDraft:
    """Makes a draft of a generation, without any other effect.

    Raises:
        ConfigInvalid: Two models have the same name.
    """
    registry.check(config)
    catalog = Catalog([*served.models, *registry.models])
    steps = {name: model.degradation for name, model in config.models.items()}
    if local is not None:
        steps[local.name] = config.model.degradation
    ladders = {
        name: DegradationLadder(ladder, skipped=requests.on_degradation_skipped) for name, ladder in steps.items()
    }
    router = Router(catalog, read_routes(config, catalog), live_rollouts)
    return GenerationDraft(
        config,
        upstream_models=served,
        router=router,
        endpoints={**served.endpoints(), **registry.endpoints},
        ladders=ladders,
    )


def build_generation(draft: GenerationDraft, parts: GatewayServices) -> ConfigGeneration:
    """Makes the generation of a draft after the services were reconfigured."""
    config, resources, clock = draft.config, parts.resources, parts.clock
    stores, access, metrics = resources.stores, resources.access, parts.metrics
    admission = parts.admission.snapshot()
    dispatchers = dict(parts.queues.all)
    control = LocalFlowController(dispatchers, admission, clock)
    retry_policy = RetryPolicy(config.dispatch.retries, parts.retry_budget, clock)
    pipeline = Pipeline(
        draft.router,
        control,
        draft.ladders,
        clock,
        bounds=RequestBounds(
            config.model.max_choices, config.model.max_prompt_logprobs, min_itl_s=config.dispatch.least_itl_s
        ),
        retry_policy=retry_policy,
        schemas=resources.schemas,
        rollout_observer=parts.rollout_observer,
        grammars=resources.grammars,
        sharing=parts.sharing,
    )
    console_routes = open_console(
        config.console, access.identity, parts.sessions, CallerUsage(stores.usage, admission, clock)
    )
    traces = resources.traces
    watching: list[RequestObserver] = [parts.observer_batch, parts.recent.batch, RequestLog()]
    if traces is not None:
        watching.append(traces)
    directory_admin = DirectoryAdmin(stores.directory, parts.controller.reload_directory, clock, access.identity.holds)
    admin = admin_routes(
        directory_admin,
        usage=stores.usage,
        budgets=admission.budgets,
        replicas=parts.replica_admin,
        rollouts=parts.rollouts,
        sleepables=parts.sleepable_models,
        pins=parts.pin_admin,
        cache=parts.cache_admin,
        timelines=parts.timelines,
        live=parts.live_state,
        configuration=parts.reloader,
        workers=parts.worker_admin,
    )
    service = ServiceRoutes(
        pipeline,
        parts.in_flight,
        metrics.render,
        stores_up=parts.store_health.stores_up,
        check_stores=parts.store_health.check_stores,
    )
    routes = api_routes(
        config.server,
        pipeline,
        service,
        embedding=Embedder(
            draft.router, dispatchers, admission, clock, cache=EmbeddingCache(parts.sharing.cache, stores.answers)
        ),
        passing=Passthrough(draft.router, control, retry_policy, clock),
        further=[
            *ResponsesRoutes(
                pipeline,
                stores.responses,
                parts.background_responses,
                strict=config.server.strict,
                heartbeat_s=config.server.heartbeat_s,
            ).routes(),
            *parts.websockets.routes(),
            *FeedbackRoutes(stores.feedback, metrics.feedback.on_feedback).routes(),
            *admin,
        ],
    )
    if (headers := litellm_headers(config, clock)) is not None:
        routes = [headers.guard(route) for route in routes]
    further: list[Route] = []
    if config.server.litellm_compatibility:
        further = litellm_routes(
            directory_admin,
            stores.usage,
            admission.budgets,
            parts.replica_admin,
            answering=pipeline,
            prices=PriceList(config.admission.prices),
            cache=parts.cache_admin,
            identity=access.identity,
            readiness=lambda: service.health().status,
        )
    edge = build_app(
        config.server,
        [*routes, *console_routes, *further],  # what stands later takes the place of `/health`
        identity=access.identity,
        in_flight=parts.in_flight,
        observers=watching,
        rate_limit_status=pipeline.rate_limit_status,
        clock=clock,
        answers=parts.idempotency_store,
        retry_budget=parts.retry_budget,
        begin=None if traces is None else traces.start_trace,
        check_limits=pipeline.check_limits,
    )
    return ConfigGeneration(
        config=config,
        app=edge,
        upstream_models=draft.upstream_models,
        models=[*draft.endpoints],
        flow_controller=control,
        observers=watching,
    )


def open_console(
    config: ConsoleConfig,
    identity: Identity,
    sessions: ConsoleSessions,
    own_use: Callable[[Principal], Awaitable[OwnUseBody]],
) -> list[Route]:
    """Returns the console's routes, and makes its sessions count; without a console, no routes and no sessions."""
    identity.accept_sessions(sessions.owner if config.enabled else None)
    if not config.enabled:
        return []
    routes = ConsoleRoutes(
        pages=pages(),
        sessions=sessions,
        identity=identity,
        again=identity.refresh_principal,
        same_origin=same_origin,
        own_use=own_use,
        cookie=COOKIE,
        session_s=config.session_s,
    )
    return routes.routes()
