"""Which pools may serve a request, in which order, and what is tried after a failure.

::

    name --aliases, wildcards--> its own targets, one after the other
                 too long for all of them --------------------> the context-length chain
                 its content refused -------------------------> the content-policy chain
                 none is there, none in time, none able to ---> the general chain

Every target passes the same filters, wherever it stands: a fallback never takes a request out of its region or its
house, nor to a model that its caller may not use. A chain is that of the name that was asked for; the chains of its
fallbacks are not followed, so what can happen to a request is on one line of the table. Where the model is chosen here
(see `maitred.routing.auto`), it is that of the model, and the larger ones stand at the end of it. Where a new version
is tried behind the name (see `maitred.routing.rollout`), the stable one follows the canary before any chain does.
"""

from collections.abc import Iterable, Set
from dataclasses import replace
from enum import StrEnum

from msgspec import Struct

from maitred.core.answer import ModelSelection
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
from maitred.routing.pools.names import ModelNames, ResolvedName
from maitred.routing.pools.requirements import ExcludedPool, ExclusionReason, RequestRequirements, objection


class TargetReason(StrEnum):
    """Why a target is on the way of a request."""

    OWN = "own"
    STABLE = "stable"
    CONTEXT_LENGTH = "context_length"
    GENERAL = "general"
    CONTENT_POLICY = "content_policy"


TargetPosition = tuple[str, str | None]
"""A pool, and what its servers are asked for."""
_RANKS: tuple[tuple[tuple[type[MaitredError], ...], TargetReason], ...] = (
    ((ContentRefused,), TargetReason.CONTENT_POLICY),
    ((ContextLengthExceeded,), TargetReason.CONTEXT_LENGTH),
    ((ReplicaUnavailable, ReplicaLost, Overloaded, Unsupported, TooExpensive), TargetReason.GENERAL),
)


class RouteTarget(Struct, frozen=True):
    """A pool that may serve a request."""

    pool: str
    model: str | None
    """What its servers are to be asked for; None: what they are configured for."""
    name: str
    """What led there, as it stands in the table: what prices, limits and metrics go by."""
    rank: TargetReason = TargetReason.OWN


class VersionSplit(Struct, frozen=True):
    """Two models behind one name."""

    name: str
    """Without aliases."""
    stable: str
    canary: str
    version: RolloutVersion
    """Which of them a request is to get."""


class Routes:
    """The table.

    Args:
        config: Without `route_faults`.
    """

    def __init__(self, config: RoutesConfig) -> None:
        self.names = ModelNames(config)
        self._config = config

    def route_plan(self, needs: RequestRequirements) -> "RoutePlan | None":
        """The way of a request; None: the table has no such name, or none that is open to the caller."""
        road = self.cached_route(needs)
        return None if road is None else RoutePlan(road)

    def cached_route(self, needs: RequestRequirements) -> "CachedRoute | None":
        """The same for all requests with these needs."""
        found = self.names.find(needs.model)
        if found is None or not is_open(needs.model, found, needs):
            return None
        fallback = self._config.fallbacks.get(found.name, _NO_FALLBACK)
        return CachedRoute(self._config, self.names, needs, found, fallback)

    def route_by_preference(
        self, needs: RequestRequirements, preference: TierPreference, tried: Set[TargetPosition] = frozenset()
    ) -> "RoutePlan | None":
        """The way of a request whose model is chosen here; None: the name, or all behind it, are closed to the caller.

        It begins at the first that is open, with that one's own chains; behind these stand those that are larger. Only
        where the request may go to none of them, the smaller ones do.

        Args:
            needs: The request.
            preference: The models.
            tried: Where it has been, and does not go again.
        """
        name = self.names.canonical(needs.model)
        if not any(map(needs.allowed, (needs.model, name))):
            return None
        order = self._open(preference.upward, needs)
        if not any(self._is_within(found, needs) for found in order.values()):
            order |= self._open(preference.downward, needs)
        if not order:
            return None
        (_, found), *others = order.items()
        own = self._config.fallbacks.get(found.name, _NO_FALLBACK)
        behind = [other for other, _ in others]
        fallback = FallbackConfig(
            general=[*own.general, *behind],
            context_length=[*own.context_length, *behind],
            content_policy=own.content_policy,
        )
        chosen = ModelSelection(name, found.key, preference.reason, preference.score)
        return RoutePlan(CachedRoute(self._config, self.names, needs, found, fallback), chosen, tried)

    def route_to_larger(
        self, needs: RequestRequirements, preference: TierPreference, route_plan: "RoutePlan"
    ) -> "RoutePlan | None":
        """The way of a request whose answer is not good enough, to those that are larger than whoever gave it.

        Args:
            needs: The request.
            preference: The models that were chosen from.
            route_plan: Where it has been.

        Returns:
            None: there is none that is larger, open to the caller and within the bounds.
        """
        # Of one that stands for two sizes, the larger counts; what is none of them is followed by those of the score.
        sizes = preference.sizes
        for place, name in reversed([*enumerate(sizes)]):
            if (found := self.names.find(name)) is not None and route_plan.last in found.targets:
                upward = sizes[place + 1 :]
                break
        else:
            upward = preference.upward[1:]
        tried = route_plan.tried
        fresh = {
            name: found
            for name, found in self._open(upward, needs).items()
            if self._is_within(found, needs) and not tried.issuperset(found.targets)
        }
        return self.route_by_preference(needs, replace(preference, upward=(*fresh,), downward=()), tried)

    def route_by_rollout(self, needs: RequestRequirements, fork: VersionSplit) -> "RoutePlan | None":
        """The way of a request to a name with a rollout; None: both versions are closed to the caller.

        Who may use the name may use what is behind it. A request that may go to one of them only goes there, whichever
        it was to get, and says nothing of the two.
        """
        named = any(map(needs.allowed, (needs.model, fork.name)))
        models = {RolloutVersion.STABLE: fork.stable, RolloutVersion.CANARY: fork.canary}
        found = ((version, model, self.names.model(model)) for version, model in models.items())
        opened = {
            version: each
            for version, model, each in found
            if each is not None and (named or is_open(model, each, needs))
        }
        fitting = {version: each for version, each in opened.items() if self._is_within(each, needs)}
        if not opened:
            return None
        version = fork.version if fork.version in fitting else next(iter(fitting or opened))
        chains = (self._config.fallbacks.get(name) for name in (fork.name, opened[version].name, fork.stable))
        fallback = next((chain for chain in chains if chain is not None), _NO_FALLBACK)
        route_plan = RoutePlan(CachedRoute(self._config, self.names, needs, opened[version], fallback))
        route_plan.arm = RolloutArm(fork.name, version, tried=len(fitting) == len(models))
        other = fitting.get(RolloutVersion.CANARY if version is RolloutVersion.STABLE else RolloutVersion.STABLE)
        if version is RolloutVersion.CANARY:
            route_plan.behind = other
        elif other is not None:
            route_plan.copy_to = RoutePlan(CachedRoute(self._config, self.names, needs, other, _NO_FALLBACK)).first()
        return route_plan

    def _open(self, names: Iterable[str], needs: RequestRequirements) -> dict[str, ResolvedName]:
        """Those of the names that the caller may use, and what they lead to."""
        found = ((name, self.names.find(name)) for name in names)
        return {name: each for name, each in found if each is not None and is_open(name, each, needs)}

    def _is_within(self, found: ResolvedName, needs: RequestRequirements) -> bool:
        """Whether the request may go to any place of a name."""
        return any(objection(self._config.pools[pool], needs) is None for pool, _ in found.targets)


class CachedRoute:
    """What the table says to all requests that need the same and ask for the same name.

    Args:
        config: The table.
        names: Its names.
        needs: What the requests need.
        resolved: What the name leads to.
        fallback: The chains after it.

    Attributes:
        targets: Where they may go at first...
        excluded: ...and where they may not.
    """

    __slots__ = ("config", "excluded", "fallback", "names", "needs", "positions", "resolved", "targets")

    def __init__(
        self,
        config: RoutesConfig,
        names: ModelNames,
        needs: RequestRequirements,
        found: ResolvedName,
        fallback: FallbackConfig,
    ) -> None:
        self.config = config
        self.names = names
        self.needs = needs
        self.resolved = found
        self.fallback = fallback
        self.positions = dict.fromkeys(found.targets)
        """Each once."""
        self.targets: list[RouteTarget] = []
        self.excluded: list[ExcludedPool] = []
        for place in self.positions:
            self.judge(place, found.key, TargetReason.OWN, self.targets, self.excluded)

    def judge(
        self,
        place: TargetPosition,
        key: str,
        rank: TargetReason,
        targets: list[RouteTarget],
        left_out: list[ExcludedPool],
    ) -> None:
        """Adds a place to those where the requests may go, or to the others."""
        pool, model = place
        against = objection(self.config.pools[pool], self.needs)
        if against is None:
            targets.append(RouteTarget(pool, model, key, rank))
        else:
            left_out.append(ExcludedPool(pool, *against))


class RoutePlan:
    """The targets of one request, one after the other. Made by `Routes.route_plan`.

    Args:
        road: That it goes.
        selection: Why this one, where the caller had left it open.
        tried: The places that it was sent to before, where it does not go again.

    Attributes:
        selection: See above.
        excluded: The pools that it may not go to.
        last: The place that it was sent to last.
        arm: Which side of a rollout it is on; None: there is none behind its name.
        behind: What follows when all targets of a canary have failed.
        copy_to: Where it may be answered a second time, for comparison.
    """

    def __init__(
        self, road: CachedRoute, chosen: ModelSelection | None = None, tried: Set[TargetPosition] = frozenset()
    ) -> None:
        self.selection = chosen
        self.excluded = road.excluded
        self.arm: RolloutArm | None = None
        self.behind: ResolvedName | None = None
        self.copy_to: RouteTarget | None = None
        self.last: TargetPosition | None = None
        self._cached_route = road
        self._before = tried
        self._went: tuple[TargetPosition, ...] = ()
        targets = road.targets
        self._ahead = [each for each in targets if (each.pool, each.model) not in tried] if tried else targets
        self._at = 0
        """Among these."""
        self._seen: set[TargetPosition] | None = None
        """All that were judged; None: those of the road, whose lists it goes by, as most do to their end."""
        self._entered = _OWN

    @property
    def name(self) -> str:
        """What was asked for or chosen, without aliases."""
        return self._cached_route.resolved.name

    @property
    def tried(self) -> set[TargetPosition]:
        """The places that it was sent to, here or before."""
        return {*self._before, *self._went}

    def first(self) -> RouteTarget:
        """Where it goes.

        Raises:
            MaitredError: Nowhere; whose turn it is to act, and why no pool would do.
        """
        if not self._has_next:
            self._enter(TargetReason.GENERAL)
            if not self._has_next:
                raise self._refusal()
        return self._next()

    def after(self, failure: MaitredError) -> RouteTarget | None:
        """Where it goes after the last target has failed it before anything of an answer was there; None: nowhere."""
        rank = next((rank for kinds, rank in _RANKS if isinstance(failure, kinds)), None)
        if rank is None:
            return None
        if rank is TargetReason.CONTENT_POLICY:
            self._at = len(self._ahead)  # other places of the same model would refuse it, too
        if not self._has_next and self.behind is not None:
            behind, self.behind = self.behind, None
            self._add(behind, TargetReason.STABLE)
        if not self._has_next:
            self._enter(rank)
        return self._next() if self._has_next else None

    def arm_at(self, target: RouteTarget) -> RolloutArm | None:
        """Which side of a rollout serves it there; None: there is none, or neither does."""
        if self.arm is None or target.rank not in (TargetReason.OWN, TargetReason.STABLE):
            return None
        return (
            self.arm
            if target.rank is TargetReason.OWN
            else RolloutArm(self.arm.rollout, RolloutVersion.STABLE, self.arm.tried)
        )

    @property
    def ends(self) -> bool:
        """Whether there is nothing after the target that it was given last, whatever happens there."""
        return not self._has_next and self.behind is None and self._cached_route.fallback == _NO_FALLBACK

    @property
    def _has_next(self) -> bool:
        return self._at < len(self._ahead)

    def _next(self) -> RouteTarget:
        target = self._ahead[self._at]
        self._at += 1
        self.last = place = target.pool, target.model
        self._went += (place,)
        return target

    def _enter(self, rank: TargetReason) -> None:
        """The chain is next, unless it has been."""
        if rank in self._entered:
            return
        self._entered |= {rank}
        self._extend(getattr(self._cached_route.fallback, rank), rank)

    def _extend(self, names: Iterable[str], rank: TargetReason) -> None:
        road = self._cached_route
        for name in names:
            found = road.names.find(name)
            if found is not None and is_open(name, found, road.needs):
                self._add(found, rank)

    def _add(self, found: ResolvedName, rank: TargetReason) -> None:
        """What a name leads to, each place once."""
        if self._seen is None:
            self._ahead, self.excluded = [*self._ahead], [*self.excluded]
            self._seen = {*self._before, *self._cached_route.positions}
        for place in found.targets:
            if place not in self._seen:
                self._seen.add(place)
                self._cached_route.judge(place, found.key, rank, self._ahead, self.excluded)

    def _refusal(self) -> MaitredError:
        reasons = "; ".join(f"{each.pool} {each.why}" for each in self.excluded) or "none is named for it"
        message = f"No pool can serve this request to {self.name!r}: {reasons}."
        if {each.reason for each in self.excluded} <= {ExclusionReason.PRIVACY, ExclusionReason.REGION}:
            return Forbidden(f"{message} Ask for a model that is served where the request may go.", param="model")
        return InvalidRequest(f"{message} Leave out what it asks for, or ask for another model.", param="model")


def is_open(name: str, found: ResolvedName, needs: RequestRequirements) -> bool:
    """Whether the caller may use what a name leads to: under that name, without aliases, or as the table has it."""
    return any(map(needs.allowed, (name, found.name, found.key)))


_NO_FALLBACK = FallbackConfig()
_OWN = frozenset({TargetReason.OWN})
