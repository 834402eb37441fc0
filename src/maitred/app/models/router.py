"""From what a request says to the models that may serve it."""

import difflib
from collections.abc import Mapping

from maitred.config.tree import Config, TextModelConfig
from maitred.core.answer import InferenceRequest
from maitred.core.errors import ModelNotFound
from maitred.core.rollout import RolloutVersion
from maitred.core.tenancy import Principal
from maitred.replica.upstream.address import Address
from maitred.routing.auto.tiers import AutoModel
from maitred.routing.catalog import AnyModel, Catalog
from maitred.routing.escalation.config import EscalationConfig
from maitred.routing.pools.config import PoolConfig, RoutesConfig
from maitred.routing.pools.names import ModelNames
from maitred.routing.pools.requirements import RequestRequirements
from maitred.routing.pools.route_table import CachedRoute, RoutePlan, Routes, RouteTarget, VersionSplit
from maitred.routing.rollout.live import LiveRollout, LiveRollouts

LOCAL_ONLY = "local-only"
"""The tag of tenants whose requests never leave."""
_MOST_ROADS = 1024
"""Beyond which all are looked for anew: behind a name with a `*` there are as many as callers think of."""
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


class Router:
    """The names that requests use, and where they lead.

    Args:
        catalog: What is served.
        routes: The names beside those of the catalog; None: there are none.
        rollouts: The names behind which a new version is tried; None: there are none.
    """

    def __init__(
        self, catalog: Catalog, routes: RoutesConfig | None = None, rollouts: LiveRollouts | None = None
    ) -> None:
        self._catalog = catalog
        self._rollouts = LiveRollouts() if rollouts is None else rollouts
        routes = routes or routes_of(Config(), catalog)
        self._routes = Routes(routes)
        self._pools = routes.pools
        self._auto = {name: AutoModel(auto) for name, auto in routes.auto.items()}
        self._roads: dict[tuple[str, frozenset[str] | None], CachedRoute] = {}
        """Of requests that need nothing but a model: its name as they say it, and the models open to their caller."""

    def way(self, ask: InferenceRequest, principal: Principal, request_id: str = "") -> RoutePlan:
        """The models that may serve a request, one after the other.

        Raises:
            ModelNotFound: The name leads nowhere for this caller; the message has the names that would have worked.
        """
        if self._is_plain(ask, principal) and (road := self._plain_road(ask.model, principal)) is not None:
            return RoutePlan(road)
        rollout = self._rollout_of(ask.model)
        sticky = None if rollout is None else _sticky_key(rollout.config.sticky, ask, principal, request_id)
        way = self._way(_needs_of(ask, principal), ask, sticky)
        if way is None:
            raise ModelNotFound(_not_found(ask.model, self.open_to(principal)), param="model")
        return way

    def escalation(self, name: str) -> EscalationConfig | None:
        """Which answers to requests for a name are asked of a larger model as well; None: none are."""
        auto = self._auto_of(name) if self._auto else None
        return None if auto is None else auto.escalation

    def way_upward(self, ask: InferenceRequest, principal: Principal, way: RoutePlan) -> RoutePlan | None:
        """The models that are larger than the one which has answered; None: there is none that it may go to."""
        auto, needs = self._auto_of(ask.model), _needs_of(ask, principal)
        return None if auto is None else self._routes.way_upward(needs, auto.preference(ask), way)

    def tells_logprobs(self, target: RouteTarget) -> bool:
        """Whether log-probabilities may be asked of a model that nobody has asked for."""
        capabilities = self._pools[target.pool].capabilities
        return capabilities is None or "logprobs" in capabilities

    def model(self, target: RouteTarget) -> AnyModel:
        """What serves there."""
        return self._catalog[target.pool]

    def named(self, name: str, principal: Principal) -> AnyModel:
        """What serves a name first, whatever a request may need.

        Raises:
            ModelNotFound: See `way`.
        """
        way = self._way(RequestRequirements(name, allowed=principal.may_use))
        if way is None:
            raise ModelNotFound(_not_found(name, self.open_to(principal)), param="model")
        return self.model(way.first())

    def behind(self, name: str | None = None) -> list[AnyModel]:
        """What serves a name first, or may be chosen for it; or everything. Nothing where a name leads nowhere."""
        if name is None:
            return list(self._catalog)
        if (auto := self._auto_of(name)) is not None:
            return [model for each in auto.names for model in self.behind(each)]
        way = self._routes.way(RequestRequirements(name))
        return [] if way is None else [self.model(way.first())]

    def open_to(self, principal: Principal) -> list[str]:
        """The names that this caller may use and that can be listed."""
        return [
            name
            for name in self._routes.names.listed
            if self._way(RequestRequirements(name, allowed=principal.may_use))
        ]

    @property
    def names(self) -> ModelNames:
        """The table of names."""
        return self._routes.names

    def _is_plain(self, ask: InferenceRequest, principal: Principal) -> bool:
        """Whether it may go wherever the name leads, and the name is nobody's to choose behind."""
        free = not (ask.needs or ask.local_only or principal.tags) and ask.sampling.top_logprobs is None
        anywhere = ask.regions is None and principal.regions is None
        return free and anywhere and not (self._auto or self._routes.names.rollouts or self._rollouts)

    def _plain_road(self, name: str, principal: Principal) -> CachedRoute | None:
        """What the table says to such requests; None: the name leads nowhere for this caller."""
        road = self._roads.get((name, principal.models))
        if (
            road is None
            and (road := self._routes.road(RequestRequirements(name, allowed=principal.may_use))) is not None
        ):
            if len(self._roads) >= _MOST_ROADS:
                self._roads.clear()
            self._roads[name, principal.models] = road
        return road

    def _way(
        self, needs: RequestRequirements, ask: InferenceRequest | None = None, sticky: str | None = None
    ) -> RoutePlan | None:
        """See `Routes`; without a request as for one of which nothing is known."""
        if (rollout := self._rollout_of(needs.model)) is not None:
            return self._routes.way_by_rollout(needs, _fork(rollout, sticky))
        auto = self._auto_of(needs.model)
        if auto is None:
            return self._routes.way(needs)
        return self._routes.way_by_preference(needs, auto.preference(ask))

    def _rollout_of(self, name: str) -> LiveRollout | None:
        """What is tried behind a name; None: nothing."""
        return self._rollouts.get(self._routes.names.canonical(name))

    def _auto_of(self, name: str) -> AutoModel | None:
        """The choice that is made behind a name; None: it is that of a model."""
        return self._auto.get(self._routes.names.canonical(name))


def routes_of(config: Config, catalog: Catalog) -> RoutesConfig:
    """The whole table: every model under its own name, and what the configuration adds."""
    return config.routing.table({model.name: _pool_of(config.models.get(model.name), config) for model in catalog})


def _fork(rollout: LiveRollout, sticky: str | None) -> VersionSplit:
    """The two versions behind a name, and which of them a request is to get; without a key, the main one."""
    config = rollout.config
    if sticky is None:
        version = RolloutVersion.CANARY if rollout.main == config.canary else RolloutVersion.STABLE
    else:
        version = rollout.split.version_for(sticky)
    return VersionSplit(rollout.state.name, config.stable, config.canary, version)


def _sticky_key(sticky: str, ask: InferenceRequest, principal: Principal, request_id: str) -> str:
    """What stays at one version."""
    if sticky == "request":
        return request_id
    organisation = principal.tenants[-1]
    session = ask.session or ask.user
    if sticky == "session" and session is not None:
        return f"{organisation}/session/{session}"
    return f"{organisation}/key/{principal.key}"


def _pool_of(model: TextModelConfig | None, config: Config) -> PoolConfig:
    if model is None:
        return PoolConfig(region=config.model.region)
    local = model.local
    if local is None:
        local = all(Address(upstream.url).private for upstream in model.upstreams)
    return PoolConfig(capabilities=model.capabilities, local=local, region=model.region)


def _needs_of(ask: InferenceRequest, principal: Principal) -> RequestRequirements:
    regions = principal.regions
    if ask.regions is not None:
        regions = ask.regions if regions is None else regions & ask.regions
    return RequestRequirements(
        ask.model,
        _capabilities_of(ask, _CAPABILITIES),
        ask.local_only or LOCAL_ONLY in principal.tags,
        regions,
        principal.may_use,
    )


def _capabilities_of(ask: InferenceRequest, known: Mapping[str, str]) -> frozenset[str]:
    needed = {known[field] for field in ask.needs if field in known}
    if ask.sampling.top_logprobs is not None:
        needed.add("logprobs")
    return frozenset(needed)


def _not_found(name: str, served: list[str]) -> str:
    if not served:
        return f"The model {name[:200]!r} is not served to this key, and no other one is."
    close = difflib.get_close_matches(name[:200], served, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"The model {name[:200]!r} is not served here.{hint} Served: {', '.join(sorted(served))}."
