"""Which pools may serve a request, in which order, and why the others may not.

::

    name --aliases, wildcards--> its own targets --too long for all of them?--> the context-length chain
                                                 --then-----------------------> the general chain

Every target passes the same filters, wherever it stands: a fallback never takes a request out of its region or its
house. A chain is that of the name that was asked for; the chains of its fallbacks are not followed, so what can happen
to a request is on one line of the table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from maitred.core.errors import ContextLengthExceeded, Forbidden, InvalidRequest, MaitredError, ReplicaUnavailable
from maitred.routing.pools.config import FallbackConfig, RoutesConfig
from maitred.routing.pools.names import Names
from maitred.routing.pools.needs import Ground, LeftOut, Needs, objection


class Rank(StrEnum):
    """Why a candidate is on the list."""

    OWN = "own"
    CONTEXT_LENGTH = "context_length"
    GENERAL = "general"
    CONTENT_POLICY = "content_policy"


@dataclass(frozen=True, slots=True)
class Target:
    """A pool that may serve a request."""

    pool: str
    model: str
    """The model's name there."""
    name: str
    """The name in the table that led there."""
    rank: Rank


@dataclass(frozen=True, slots=True)
class Route:
    """The answer for one request."""

    name: str
    """Without aliases."""
    targets: Sequence[Target]
    """To be tried in this order."""
    left_out: Sequence[LeftOut]

    def refusal(self) -> MaitredError:
        """The error of a route without targets: whose turn it is to act, and why no pool would do."""
        reasons = "; ".join(f"{each.pool} {each.why}" for each in self.left_out) or "none is named for it"
        message = f"No pool can serve this request to {self.name!r}: {reasons}."
        grounds = {each.ground for each in self.left_out}
        if Ground.HEALTH in grounds:
            return ReplicaUnavailable(message)
        if Ground.CONTEXT_LENGTH in grounds:
            return ContextLengthExceeded(f"{message} Shorten the prompt or lower max_tokens.")
        if grounds <= {Ground.PRIVACY, Ground.REGION}:
            return Forbidden(f"{message} Ask for a model that is served where the request may go.", param="model")
        if Ground.COST in grounds:
            return InvalidRequest(f"{message} Shorten it, or allow a higher cost.")
        return InvalidRequest(f"{message} Leave out what it asks for, or ask for another model.", param="model")


class Routes:
    """The table.

    Args:
        config: Without `route_faults`.
        usable: Whether a pool has a replica that takes requests now.
    """

    def __init__(self, config: RoutesConfig, usable: Callable[[str], bool] = lambda pool: True) -> None:
        self.names = Names(config)
        self._pools = config.pools
        self._fallbacks = config.fallbacks
        self._usable = usable

    def find(self, needs: Needs) -> Route | None:
        """Where the request may go; None: the table has no such name."""
        found = self.names.find(needs.model)
        if found is None:
            return None
        search = _Search(self, needs)
        search.add([found.name], Rank.OWN)
        fallback = self._fallbacks.get(found.name, FallbackConfig())
        if not search.targets and any(each.ground is Ground.CONTEXT_LENGTH for each in search.left_out):
            search.add(fallback.context_length, Rank.CONTEXT_LENGTH)
        search.add(fallback.general, Rank.GENERAL)
        return Route(found.name, search.targets, search.left_out)

    def after_refusal(self, needs: Needs) -> Route | None:
        """Where it may go after a provider has refused its content; None: the table has no such name."""
        found = self.names.find(needs.model)
        if found is None:
            return None
        search = _Search(self, needs)
        search.add(self._fallbacks.get(found.name, FallbackConfig()).content_policy, Rank.CONTENT_POLICY)
        return Route(found.name, search.targets, search.left_out)

    def objection(self, pool: str, needs: Needs) -> tuple[Ground, str] | None:
        """Why a pool may not serve it."""
        against = objection(self._pools[pool], needs)
        if against is None and not self._usable(pool):
            return Ground.HEALTH, "has no replica that takes requests now"
        return against


class _Search:
    """Collects targets, each once."""

    def __init__(self, routes: Routes, needs: Needs) -> None:
        self.targets: list[Target] = []
        self.left_out: list[LeftOut] = []
        self._routes = routes
        self._needs = needs
        self._seen: set[tuple[str, str]] = set()

    def add(self, names: Iterable[str], rank: Rank) -> None:
        """What these names lead to."""
        for name in names:
            found = self._routes.names.find(name)
            for pool, model in found.targets if found is not None else ():
                if (pool, model) in self._seen:
                    continue
                self._seen.add((pool, model))
                against = self._routes.objection(pool, self._needs)
                if against is None:
                    self.targets.append(Target(pool, model, name, rank))
                else:
                    self.left_out.append(LeftOut(pool, model, *against))
