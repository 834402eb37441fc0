"""Routing table: the pools that may serve a request, their order, and the fallbacks after a failure.

::

    name --aliases, wildcards--> its own targets, one after the other
                 too long for all of them --------------------> the context-length chain
                 its content refused -------------------------> the content-policy chain
                 none is there, none in time, none able to ---> the general chain

Every target passes the same filters at every position: a fallback never sends a request out of its region, off our own
machines, or to a model that its caller may not use. A fallback chain belongs to the requested name; the chains of its
fallbacks are ignored, so one entry of the table shows everything that can happen to a request. If the gateway selects
the model (see `maitred.routing.auto`), the chain is the chain of the selected model, followed by the larger models. If
a rollout tries a new version for the name (see `maitred.routing.rollout`), the stable version follows the canary,
before any chain.
"""

from collections.abc import Iterable, Set
from dataclasses import replace
from enum import StrEnum

from msgspec import Struct

from maitred.core.context import ModelSelection
from maitred.core.errors import (
    ContentRefused,
    ContextLengthExceeded,
    Forbidden,
    InvalidRequest,
    MaitredError,
    Overloaded,
    ReplicaLost,
    ReplicaUnavailable,
    TooExpensive,
    Unsupported,
)
from maitred.core.rollout import RolloutArm, RolloutVersion
from maitred.routing.auto.tiers import TierPreference
from maitred.routing.pools.config import FallbackConfig, RoutesConfig
from maitred.routing.pools.names import NameResolver, ResolvedName
from maitred.routing.pools.requirements import ExcludedPool, ExclusionReason, RequestRequirements, find_exclusion


class TargetReason(StrEnum):
    """Reason why the route plan of a request contains a target."""

    OWN = "own"
    STABLE = "stable"
    CONTEXT_LENGTH = "context_length"
    GENERAL = "general"
    CONTENT_POLICY = "content_policy"


TargetKey = tuple[str, str | None]
"""Pair of a pool and the model name that is sent to its servers."""
_REASONS_BY_ERROR: tuple[tuple[tuple[type[MaitredError], ...], TargetReason], ...] = (
    ((ContentRefused,), TargetReason.CONTENT_POLICY),
    ((ContextLengthExceeded,), TargetReason.CONTEXT_LENGTH),
    ((ReplicaUnavailable, ReplicaLost, Overloaded, Unsupported, TooExpensive), TargetReason.GENERAL),
)


class RouteTarget(Struct, frozen=True):
    """Target of a route: a pool that may serve a request."""

    pool: str
    model: str | None
    """Model name that is sent to the servers, or None for the configured model name."""
    name: str
    """Name that led to the target, as written in the table; prices, limits and metrics use this name."""
    reason: TargetReason = TargetReason.OWN


class VersionSplit(Struct, frozen=True):
    """Split of one name's requests between two models."""

    name: str
    """The name without aliases."""
    stable: str
    canary: str
    version: RolloutVersion
    """Version that is intended for the request."""


class RoutingTable:
    """Routing table of one configuration.

    Args:
        config: The table; `route_faults` has found no faults in it.
    """

    def __init__(self, config: RoutesConfig) -> None:
        self.names = NameResolver(config)
        self._config = config

    def make_plan(self, needs: RequestRequirements) -> "RoutePlan | None":
        """Makes the route plan of a request.

        Returns None if the table has no such name, or if the caller may not use it.
        """
        cached_route = self.make_cached_route(needs)
        return None if cached_route is None else RoutePlan(cached_route)

    def make_cached_route(self, needs: RequestRequirements) -> "CachedRoute | None":
        """Makes the route that all requests with these needs share; returns None as `make_plan` does."""
        resolved = self.names.resolve(needs.model)
        if resolved is None or not is_allowed(needs.model, resolved, needs):
            return None
        fallback = self._config.fallbacks.get(resolved.name, _NO_FALLBACK)
        return CachedRoute(self._config, self.names, needs, resolved, fallback=fallback)

    def route_by_preference(
        self, needs: RequestRequirements, preference: TierPreference, tried: Set[TargetKey] = frozenset()
    ) -> "RoutePlan | None":
        """Makes the plan of a request whose model the gateway selects, or None.

        None means that the caller may use none of the models.

        The plan begins with the first allowed model and the chains of that model; the larger models follow. The smaller
        models are used only if the request may go to none of the others.

        Args:
            needs: The request.
            preference: The models.
            tried: Targets to which the request was sent before; they are skipped.
        """
        name = self.names.canonical(needs.model)
        if not any(map(needs.allowed, (needs.model, name))):
            return None
        order = self._resolve_allowed(preference.upward, needs)
        if not any(self._is_permitted(resolved, needs) for resolved in order.values()):
            order |= self._resolve_allowed(preference.downward, needs)
        if not order:
            return None
        (_, resolved), *larger = order.items()
        own_fallback = self._config.fallbacks.get(resolved.name, _NO_FALLBACK)
        larger_names = [other for other, _ in larger]
        fallback = FallbackConfig(
            general=[*own_fallback.general, *larger_names],
            context_length=[*own_fallback.context_length, *larger_names],
            content_policy=own_fallback.content_policy,
        )
        selection = ModelSelection(name, resolved.key, preference.reason, preference.score)
        return RoutePlan(CachedRoute(self._config, self.names, needs, resolved, fallback=fallback), selection, tried)

    def route_to_larger(
        self, needs: RequestRequirements, preference: TierPreference, route_plan: "RoutePlan"
    ) -> "RoutePlan | None":
        """Makes the plan of a request whose answer failed a check, with only larger models.

        Args:
            needs: The request.
            preference: The models that were chosen from.
            route_plan: Current plan of the request.

        Returns:
            None: The new plan, or None if no larger model is allowed for the caller and the request.
        """
        # If a model has two sizes, the larger size counts. A model without a size is followed by the models that the
        # score selects.
        sizes = preference.models_by_size
        for index, name in reversed([*enumerate(sizes)]):
            if (resolved := self.names.resolve(name)) is not None and route_plan.last_target in resolved.targets:
                upward = sizes[index + 1 :]
                break
        else:
            upward = preference.upward[1:]
        tried = route_plan.tried
        untried = {
            name: resolved
            for name, resolved in self._resolve_allowed(upward, needs).items()
            if self._is_permitted(resolved, needs) and not tried.issuperset(resolved.targets)
        }
        return self.route_by_preference(needs, replace(preference, upward=(*untried,), downward=()), tried)

    def route_by_rollout(self, needs: RequestRequirements, version_split: VersionSplit) -> "RoutePlan | None":
        """Makes the plan of a request to a name with a rollout.

        Returns None if the caller may use neither version.

        A caller who may use the name may use both versions. A request that may go to only one version goes to that
        version, even if the other was intended, and is evidence for neither.
        """
        name_allowed = any(map(needs.allowed, (needs.model, version_split.name)))
        models = {RolloutVersion.STABLE: version_split.stable, RolloutVersion.CANARY: version_split.canary}
        candidates = ((version, model, self.names.resolve_model(model)) for version, model in models.items())
        allowed = {
            version: resolved
            for version, model, resolved in candidates
            if resolved is not None and (name_allowed or is_allowed(model, resolved, needs))
        }
        permitted = {version: resolved for version, resolved in allowed.items() if self._is_permitted(resolved, needs)}
        if not allowed:
            return None
        version = version_split.version if version_split.version in permitted else next(iter(permitted or allowed))
        chains = (
            self._config.fallbacks.get(name)
            for name in (version_split.name, allowed[version].name, version_split.stable)
        )
        fallback = next((chain for chain in chains if chain is not None), _NO_FALLBACK)
        route_plan = RoutePlan(
            CachedRoute(self._config, self.names, needs, resolved=allowed[version], fallback=fallback)
        )
        route_plan.arm = RolloutArm(version_split.name, version, tried=len(permitted) == len(models))
        other = permitted.get(RolloutVersion.CANARY if version is RolloutVersion.STABLE else RolloutVersion.STABLE)
        if version is RolloutVersion.CANARY:
            route_plan.stable_fallback = other
        elif other is not None:
            route_plan.shadow_target = RoutePlan(
                CachedRoute(self._config, self.names, needs, resolved=other, fallback=_NO_FALLBACK)
            ).first_target()
        return route_plan

    def _resolve_allowed(self, names: Iterable[str], needs: RequestRequirements) -> dict[str, ResolvedName]:
        """Resolves the names that the caller may use."""
        candidates = ((name, self.names.resolve(name)) for name in names)
        return {
            name: resolved
            for name, resolved in candidates
            if resolved is not None and is_allowed(name, resolved, needs)
        }

    def _is_permitted(self, resolved: ResolvedName, needs: RequestRequirements) -> bool:
        """Returns whether the request may go to any target of a name."""
        return any(find_exclusion(self._config.pools[pool], needs) is None for pool, _ in resolved.targets)


class CachedRoute:
    """Route that is shared by all requests with the same name and the same requirements.

    Args:
        config: The routing table.
        names: Resolver of its names.
        needs: Requirements of the requests.
        resolved: The name that the requests ask for.
        fallback: The fallback chains that follow the targets of the name.

    Attributes:
        targets: Targets where they may go at first...
        excluded: ...and pools where they may not.
        has_other_targets: Whether there may be another target after a general failure of the first one.
    """

    __slots__ = (
        *("config", "excluded", "fallback", "has_other_targets", "names", "needs", "resolved", "target_keys"),
        "targets",
    )

    def __init__(
        self,
        config: RoutesConfig,
        names: NameResolver,
        needs: RequestRequirements,
        resolved: ResolvedName,
        fallback: FallbackConfig,
    ) -> None:
        self.config = config
        self.names = names
        self.needs = needs
        self.resolved = resolved
        self.fallback = fallback
        self.target_keys = dict.fromkeys(resolved.targets)
        """Targets of the name, without duplicates."""
        self.targets: list[RouteTarget] = []
        self.excluded: list[ExcludedPool] = []
        for target_key in self.target_keys:
            self.add_target(target_key, resolved.key, TargetReason.OWN, self.targets, self.excluded)
        self.has_other_targets = len(self.targets) > 1 or bool(fallback.general)

    def add_target(
        self,
        target_key: TargetKey,
        key: str,
        reason: TargetReason,
        targets: list[RouteTarget],
        excluded: list[ExcludedPool],
    ) -> None:
        """Adds the target if the requests may use it, or else adds its pool to the excluded pools."""
        pool, model = target_key
        exclusion = find_exclusion(self.config.pools[pool], self.needs)
        if exclusion is None:
            targets.append(RouteTarget(pool, model, key, reason))
        else:
            excluded.append(ExcludedPool(pool, *exclusion))


class RoutePlan:
    """Route plan of one request: its targets in order; made by `RoutingTable.make_plan`.

    Args:
        cached_route: The cached route for the name of the request.
        selection: Reason why the gateway selected this model, if the caller had left the model open.
        tried: Targets to which the request was sent before; they are skipped.

    Attributes:
        selection: Reason why the gateway selected this model, if the caller had left the model open.
        excluded: The pools that the request may not use.
        last_target: The target to which the request was sent last.
        arm: Side of the rollout that serves the request; None if its name has no rollout.
        stable_fallback: The stable version; it follows when all targets of a canary have failed.
        shadow_target: Target that may answer a copy of the request, for comparison.
        has_other_targets: Whether there may be another target after a general failure of the first one; a stable
            version is not counted.
    """

    def __init__(
        self, cached_route: CachedRoute, selection: ModelSelection | None = None, tried: Set[TargetKey] = frozenset()
    ) -> None:
        self.selection = selection
        self.excluded = cached_route.excluded
        self.has_other_targets = cached_route.has_other_targets
        self.arm: RolloutArm | None = None
        self.stable_fallback: ResolvedName | None = None
        self.shadow_target: RouteTarget | None = None
        self.last_target: TargetKey | None = None
        self._cached_route = cached_route
        self._tried_before = tried
        self._sent_to: tuple[TargetKey, ...] = ()
        targets = cached_route.targets
        self._targets = [target for target in targets if (target.pool, target.model) not in tried] if tried else targets
        self._next_index = 0
        """Index of the next target in this list."""
        self._seen_keys: set[TargetKey] | None = None
        """Targets that were considered, or None for the targets of the cached route.

        The plan shares the lists of the cached route until a fallback is added; for most plans this never happens.
        """
        self._entered_chains = _OWN_REASON

    @property
    def name(self) -> str:
        """Requested or selected name, with aliases resolved."""
        return self._cached_route.resolved.name

    @property
    def tried(self) -> set[TargetKey]:
        """Targets to which the request was sent, by this plan or before."""
        return {*self._tried_before, *self._sent_to}

    def first_target(self) -> RouteTarget:
        """Returns the first target.

        Raises:
            MaitredError: There is no target; the error gives the reason for each pool and says who has to act.
        """
        target = self._advance()
        if target is None:
            self._enter_chain(TargetReason.GENERAL)
            target = self._advance()
            if target is None:
                raise self._make_error()
        return target

    def next_target(self, failure: MaitredError) -> RouteTarget | None:
        """Returns the next target after the last one failed before any output, or None if there is none."""
        reason = next(
            (reason for error_classes, reason in _REASONS_BY_ERROR if isinstance(failure, error_classes)), None
        )
        if reason is None:
            return None
        if reason is TargetReason.CONTENT_POLICY:
            self._next_index = len(self._targets)  # other targets of the same model would also refuse the request
        target = self._advance()
        if target is None and self.stable_fallback is not None:
            stable_fallback, self.stable_fallback = self.stable_fallback, None
            self._add_resolved(stable_fallback, TargetReason.STABLE)
            target = self._advance()
        if target is None:
            self._enter_chain(reason)
            target = self._advance()
        return target

    def arm_for(self, target: RouteTarget) -> RolloutArm | None:
        """Returns the rollout side of this target, or None.

        None means that there is no rollout, or that the target is on neither side.
        """
        if self.arm is None or target.reason not in (TargetReason.OWN, TargetReason.STABLE):
            return None
        return (
            self.arm
            if target.reason is TargetReason.OWN
            else RolloutArm(self.arm.rollout, RolloutVersion.STABLE, self.arm.tried)
        )

    @property
    def has_general_target(self) -> bool:
        """Whether another target follows after a general failure of the last one."""
        if self._next_index < len(self._targets) or self.stable_fallback is not None:
            return True
        if TargetReason.GENERAL in self._entered_chains:
            return False
        cached_route = self._cached_route
        seen = cached_route.target_keys if self._seen_keys is None else self._seen_keys
        for name in cached_route.fallback.general:
            resolved = cached_route.names.resolve(name)
            if resolved is not None and is_allowed(name, resolved, cached_route.needs):
                for pool, model in resolved.targets:
                    if (pool, model) in seen or (pool, model) in self._tried_before:
                        continue
                    if find_exclusion(cached_route.config.pools[pool], cached_route.needs) is None:
                        return True
        return False

    def _advance(self) -> RouteTarget | None:
        """Returns the next target and notes that the request is sent there; None: there is none."""
        if self._next_index == len(self._targets):
            return None
        target = self._targets[self._next_index]
        self._next_index += 1
        self.last_target = target_key = target.pool, target.model
        self._sent_to += (target_key,)
        return target

    def _enter_chain(self, reason: TargetReason) -> None:
        """Adds the fallback chain of this reason, unless the plan has it already."""
        if reason in self._entered_chains:
            return
        self._entered_chains |= {reason}
        self._add_names(getattr(self._cached_route.fallback, reason), reason)

    def _add_names(self, names: Iterable[str], reason: TargetReason) -> None:
        cached_route = self._cached_route
        for name in names:
            resolved = cached_route.names.resolve(name)
            if resolved is not None and is_allowed(name, resolved, cached_route.needs):
                self._add_resolved(resolved, reason)

    def _add_resolved(self, resolved: ResolvedName, reason: TargetReason) -> None:
        """Adds the targets of a name, without duplicates."""
        if self._seen_keys is None:
            self._targets, self.excluded = [*self._targets], [*self.excluded]
            self._seen_keys = {*self._tried_before, *self._cached_route.target_keys}
        for target_key in resolved.targets:
            if target_key not in self._seen_keys:
                self._seen_keys.add(target_key)
                self._cached_route.add_target(target_key, resolved.key, reason, self._targets, self.excluded)

    def _make_error(self) -> MaitredError:
        reasons = (
            "; ".join(f"{excluded_pool.pool} {excluded_pool.explanation}" for excluded_pool in self.excluded)
            or "none is named for it"
        )
        message = f"No pool can serve this request to {self.name!r}: {reasons}."
        if {excluded_pool.reason for excluded_pool in self.excluded} <= {
            ExclusionReason.PRIVACY,
            ExclusionReason.REGION,
        }:
            return Forbidden(f"{message} Ask for a model that is served where the request may go.", param="model")
        return InvalidRequest(f"{message} Leave out what it asks for, or ask for another model.", param="model")


def is_allowed(name: str, resolved: ResolvedName, needs: RequestRequirements) -> bool:
    """Returns whether the caller may use a name in any form.

    The forms are the written name, the name without aliases, and the name in the table.
    """
    return any(map(needs.allowed, (name, resolved.name, resolved.key)))


_NO_FALLBACK = FallbackConfig()
_OWN_REASON = frozenset({TargetReason.OWN})
