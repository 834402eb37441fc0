"""Router: finds the models that may serve a request."""

import difflib
from collections.abc import Mapping
from functools import partial

from maitred.config.tree import Config
from maitred.core.errors import ModelNotFound
from maitred.core.inference import InferenceRequest
from maitred.core.rollout import RolloutVersion
from maitred.core.tenancy import Principal
from maitred.replica.upstream.url import UpstreamUrl
from maitred.routing.auto.tiers import AutoModel
from maitred.routing.catalog import AnyModel, Catalog, ServedModel, TextModel
from maitred.routing.escalation.config import EscalationConfig
from maitred.routing.pools.config import PoolConfig, RoutesConfig
from maitred.routing.pools.names import NameResolver
from maitred.routing.pools.requirements import RequestRequirements
from maitred.routing.pools.route_table import CachedRoute, RoutePlan, RouteTarget, RoutingTable, VersionSplit
from maitred.routing.rollout.live import LiveRollout, LiveRollouts

LOCAL_ONLY = "local-only"
"""Tag of tenants whose requests must stay local (`local_only`)."""
_MOST_CACHED_ROUTES = 1024
"""Size at which the route cache is cleared: a name with a `*` has as many entries as callers invent names."""
_CAPABILITIES = {
    "tools": "tools",
    "functions": "tools",
    "response_format": "json_schema",
    "guided_json": "json_schema",
    "guided_regex": "json_schema",
    "guided_choice": "json_schema",
    "guided_grammar": "json_schema",
    "structured_outputs": "json_schema",
}
"""Field of a request -> what a model needs for it."""
_IMAGE_PARTS = (".image_url", ".video_url")
"""Ends of the paths of images; see `maitred.wire.openai.fields.media_parts`."""


class Router:
    """Table of the names that requests use, and of the models behind them.

    Args:
        catalog: The models that are served.
        routes: The names in addition to those of the catalog; None: there are none.
        rollouts: The rollouts behind names; None: there are none.
    """

    def __init__(
        self, catalog: Catalog, routes: RoutesConfig | None = None, rollouts: LiveRollouts | None = None
    ) -> None:
        self._catalog = catalog
        self._rollouts = LiveRollouts() if rollouts is None else rollouts
        routes = routes or read_routes(Config(), catalog)
        self._routes = RoutingTable(routes)
        self._pools = routes.pools
        self._auto = {name: AutoModel(auto) for name, auto in routes.auto.items()}
        self._cached_routes: dict[tuple[str, frozenset[str] | None], CachedRoute] = {}
        """Routes of requests with no special requirements, by the name in the request and the caller's allowed
        models."""

    def route(self, request: InferenceRequest, principal: Principal, request_id: str = "") -> RoutePlan:
        """Returns the models that may serve a request, in the order of the attempts.

        Raises:
            ModelNotFound: The name leads to no model for this caller; the message lists the names that would work.
        """
        if (route := self._cached_route(request, principal)) is not None:
            return RoutePlan(route)
        rollout = self._rollout_of(request.model)
        sticky = None if rollout is None else _sticky_key(rollout.config.sticky, request, principal, request_id)
        route_plan = self._build_route(_needs_of(request, principal), request, sticky)
        if route_plan is None:
            raise ModelNotFound(_not_found(request.model, self.models_for(principal)), param="model")
        return route_plan

    def escalation(self, name: str) -> EscalationConfig | None:
        """Returns the escalation to a larger model for the answers under a name; None: there is none."""
        auto = self._auto_of(name) if self._auto else None
        return None if auto is None else auto.escalation

    def route_to_larger(
        self, request: InferenceRequest, principal: Principal, route_plan: RoutePlan
    ) -> RoutePlan | None:
        """Returns the route to models larger than the one that has answered; None: none may be used."""
        auto, needs = self._auto_of(request.model), _needs_of(request, principal)
        return None if auto is None else self._routes.route_to_larger(needs, auto.preference_for(request), route_plan)

    def supports_logprobs(self, target: RouteTarget) -> bool:
        """Returns whether log-probabilities may be requested from a model that the client did not name."""
        capabilities = self._pools[target.pool].capabilities
        return capabilities is None or "logprobs" in capabilities

    def model(self, target: RouteTarget) -> AnyModel:
        """Returns the model of a target."""
        return self._catalog[target.pool]

    def is_refusing(self, target: RouteTarget) -> bool:
        """Returns whether a request that can begin at another model does; see `TextModel.is_refusing`."""
        model = self._catalog[target.pool]
        return isinstance(model, TextModel) and model.is_refusing()

    def resolve(self, name: str, principal: Principal) -> AnyModel:
        """Returns the model that a name leads to first, whatever a request may need.

        Raises:
            ModelNotFound: See `route`.
        """
        route_plan = self._build_route(RequestRequirements(name, allowed=principal.may_use))
        if route_plan is None:
            raise ModelNotFound(_not_found(name, self.models_for(principal)), param="model")
        return self.model(route_plan.first_target())

    def models_behind(self, name: str | None = None) -> list[AnyModel]:
        """Returns the models that a name leads to first or may choose from; without a name, all models."""
        if name is None:
            return list(self._catalog)
        if (auto := self._auto_of(name)) is not None:
            return [model for model_name in auto.model_names for model in self.models_behind(model_name)]
        route_plan = self._routes.make_plan(RequestRequirements(name))
        return [] if route_plan is None else [self.model(route_plan.first_target())]

    def models_for(self, principal: Principal) -> list[str]:
        """Returns the names that this caller may use and that can be listed."""
        return [
            name
            for name in self._routes.names.listed_names
            if self._build_route(RequestRequirements(name, allowed=principal.may_use))
        ]

    @property
    def names(self) -> NameResolver:
        """Returns the table of names."""
        return self._routes.names

    def _cached_route(self, request: InferenceRequest, principal: Principal) -> CachedRoute | None:
        """Returns the cached route of a request without requirements, from a table without choices of its own.

        Returns None if the request has requirements, if the table has automatic models or rollouts, or if the name
        leads nowhere for this caller.
        """
        sampling = request.sampling
        if sampling.top_logprobs is not None or sampling.prompt_logprobs is not None:
            return None
        if request.needs or request.local_only or principal.tags:
            return None
        if request.regions is not None or principal.regions is not None:
            return None
        if self._auto or self._routes.names.rollout_models or self._rollouts:
            return None
        name = request.model
        route = self._cached_routes.get((name, principal.models))
        if (
            route is None
            and (route := self._routes.make_cached_route(RequestRequirements(name, allowed=principal.may_use)))
            is not None
        ):
            if len(self._cached_routes) >= _MOST_CACHED_ROUTES:
                self._cached_routes.clear()
            self._cached_routes[name, principal.models] = route
        return route

    def _build_route(
        self, needs: RequestRequirements, request: InferenceRequest | None = None, sticky: str | None = None
    ) -> RoutePlan | None:
        """Makes the route of a request from the table; without a request, no requirement is assumed."""
        if (rollout := self._rollout_of(needs.model)) is not None:
            return self._routes.route_by_rollout(needs, _version_split(rollout, sticky))
        auto = self._auto_of(needs.model)
        if auto is None:
            return self._routes.make_plan(needs)
        return self._routes.route_by_preference(needs, auto.preference_for(request))

    def _rollout_of(self, name: str) -> LiveRollout | None:
        """Returns the rollout behind a name; None: there is none."""
        return self._rollouts.get(self._routes.names.canonical(name))

    def _auto_of(self, name: str) -> AutoModel | None:
        """Returns the automatic choice behind a name; None: the name is that of a model."""
        return self._auto.get(self._routes.names.canonical(name))


def read_routes(config: Config, catalog: Catalog) -> RoutesConfig:
    """Returns the whole routing table: every model under its own name, and the names of the configuration."""
    return config.routing.make_routes_config({model.name: _pool_of(model, config) for model in catalog})


def _version_split(rollout: LiveRollout, sticky: str | None) -> VersionSplit:
    """Returns the two versions behind a name and the chosen one; without a key, it is the main version."""
    config = rollout.config
    if sticky is None:
        version = RolloutVersion.CANARY if rollout.default_model == config.canary else RolloutVersion.STABLE
    else:
        version = rollout.split.version_for(sticky)
    return VersionSplit(rollout.state.name, config.stable, config.canary, version)


def _sticky_key(sticky: str, request: InferenceRequest, principal: Principal, request_id: str) -> str:
    """Returns the key whose requests all go to the same version."""
    if sticky == "request":
        return request_id
    organisation = principal.tenants[-1]
    session = request.session or request.user
    if sticky == "session" and session is not None:
        return f"{organisation}/session/{session}"
    return f"{organisation}/key/{principal.key}"


def home_region(name: str, config: Config) -> str | None:
    """Returns the region of the gateway for a model, from which requests leave only if they must.

    Servers of others are where their section says, and all of a model's are in one region.
    """
    model = config.models.get(name)
    if model is None:
        return config.region or config.model.region
    return untold_region(name, config)


def untold_region(name: str, config: Config) -> str | None:
    """Returns the region of those replicas of a model that tell none."""
    model = config.models.get(name)
    if model is None:
        return config.model.region or config.region
    return model.region or (config.region if model.path else None)


def _pool_of(served: AnyModel, config: Config) -> PoolConfig:
    region = untold_region(served.name, config)
    current_regions = partial(served.regions, region) if isinstance(served, ServedModel) else None
    model = config.models.get(served.name)
    if model is None:
        return PoolConfig(region=region, current_regions=current_regions)
    local = model.local
    if local is None:
        local = all(UpstreamUrl(upstream.url).is_private for upstream in model.upstreams)
    return PoolConfig(capabilities=model.capabilities, local=local, region=region, current_regions=current_regions)


def _needs_of(request: InferenceRequest, principal: Principal) -> RequestRequirements:
    return RequestRequirements(
        request.model,
        capabilities=_capabilities_of(request, _CAPABILITIES),
        local_only=request.local_only or LOCAL_ONLY in principal.tags,
        regions=principal.regions_for(request.regions),
        allowed=principal.may_use,
    )


def _capabilities_of(request: InferenceRequest, known: Mapping[str, str]) -> frozenset[str]:
    needed = {known[field] for field in request.needs if field in known}
    if any(field.endswith(_IMAGE_PARTS) for field in request.needs):
        needed.add("vision")
    if request.sampling.top_logprobs is not None or request.sampling.prompt_logprobs is not None:
        needed.add("logprobs")
    return frozenset(needed)


def _not_found(name: str, served: list[str]) -> str:
    if not served:
        return f"The model {name[:200]!r} is not served to this key, and no other one is."
    close = difflib.get_close_matches(name[:200], served, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"The model {name[:200]!r} is not served here.{hint} Served: {', '.join(sorted(served))}."
