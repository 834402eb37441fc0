"""Which pools may serve a request, in which order, and what is tried after a failure.

::

    name --aliases, wildcards--> its own targets, one after the other
                 too long for all of them --------------------> the context-length chain
                 its content refused -------------------------> the content-policy chain
                 none is there, none in time, none able to ---> the general chain

Every target passes the same filters, wherever it stands: a fallback never takes a request out of its region or its
house, nor to a model that its caller may not use. A chain is that of the name that was asked for; the chains of its
fallbacks are not followed, so what can happen to a request is on one line of the table.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

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
from maitred.routing.pools.config import FallbackConfig, RoutesConfig
from maitred.routing.pools.names import Found, Names
from maitred.routing.pools.needs import Ground, LeftOut, Needs, objection


class Rank(StrEnum):
    """Why a target is on the way of a request."""

    OWN = "own"
    CONTEXT_LENGTH = "context_length"
    GENERAL = "general"
    CONTENT_POLICY = "content_policy"


_RANKS: tuple[tuple[tuple[type[MaitredError], ...], Rank], ...] = (
    ((ContentRefused,), Rank.CONTENT_POLICY),
    ((ContextLengthExceeded,), Rank.CONTEXT_LENGTH),
    ((ReplicaUnavailable, ReplicaLost, Overloaded, Unsupported, TooExpensive), Rank.GENERAL),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A pool that may serve a request."""

    pool: str
    model: str | None
    """What its servers are to be asked for; None: what they are configured for."""
    name: str
    """What led there, as it stands in the table: what prices, limits and metrics go by."""
    rank: Rank = Rank.OWN


class Routes:
    """The table.

    Args:
        config: Without `route_faults`.
    """

    def __init__(self, config: RoutesConfig) -> None:
        self.names = Names(config)
        self._config = config

    def way(self, needs: Needs) -> "Way | None":
        """The way of a request; None: the table has no such name, or none that is open to the caller."""
        found = self.names.find(needs.model)
        if found is None or not any(map(needs.allowed, (needs.model, found.name, found.key))):
            return None
        fallback = self._config.fallbacks.get(found.name, _NO_FALLBACK)
        return Way(self._config, self.names, needs, found, fallback)


class Way:
    """The targets of one request, one after the other. Made by `Routes.way`.

    Attributes:
        name: What was asked for, without aliases.
        left_out: The pools that it may not go to.
    """

    def __init__(
        self, config: RoutesConfig, names: Names, needs: Needs, found: Found, fallback: FallbackConfig
    ) -> None:
        self.name = found.name
        self.left_out: list[LeftOut] = []
        self._config = config
        self._names = names
        self._needs = needs
        self._fallback = fallback
        self._ahead: deque[Target] = deque()
        self._seen: set[tuple[str, str | None]] = set()
        self._ranks = {Rank.OWN}
        self._add(found, Rank.OWN)

    def first(self) -> Target:
        """Where it goes.

        Raises:
            MaitredError: Nowhere; whose turn it is to act, and why no pool would do.
        """
        if not self._ahead:
            self._enter(Rank.GENERAL)
        if not self._ahead:
            raise self._refusal()
        return self._ahead.popleft()

    def after(self, failure: MaitredError) -> Target | None:
        """Where it goes after the last target has failed it before anything of an answer was there; None: nowhere."""
        rank = next((rank for kinds, rank in _RANKS if isinstance(failure, kinds)), None)
        if rank is None:
            return None
        if rank is Rank.CONTENT_POLICY:
            self._ahead.clear()  # other places of the same model would refuse it, too
        if not self._ahead:
            self._enter(rank)
        return self._ahead.popleft() if self._ahead else None

    @property
    def ends(self) -> bool:
        """Whether there is nothing after the target that it was given last, whatever happens there."""
        return not self._ahead and self._fallback == _NO_FALLBACK

    def _enter(self, rank: Rank) -> None:
        """The chain is next, unless it has been."""
        if rank in self._ranks:
            return
        self._ranks.add(rank)
        self._extend(getattr(self._fallback, rank), rank)

    def _extend(self, names: Iterable[str], rank: Rank) -> None:
        for name in names:
            found = self._names.find(name)
            if found is not None and any(map(self._needs.allowed, (name, found.name, found.key))):
                self._add(found, rank)

    def _add(self, found: Found, rank: Rank) -> None:
        """What a name leads to, each place once."""
        for pool, model in found.targets:
            if (pool, model) in self._seen:
                continue
            self._seen.add((pool, model))
            against = objection(self._config.pools[pool], self._needs)
            if against is None:
                self._ahead.append(Target(pool, model, found.key, rank))
            else:
                self.left_out.append(LeftOut(pool, *against))

    def _refusal(self) -> MaitredError:
        reasons = "; ".join(f"{each.pool} {each.why}" for each in self.left_out) or "none is named for it"
        message = f"No pool can serve this request to {self.name!r}: {reasons}."
        if {each.ground for each in self.left_out} <= {Ground.PRIVACY, Ground.REGION}:
            return Forbidden(f"{message} Ask for a model that is served where the request may go.", param="model")
        return InvalidRequest(f"{message} Leave out what it asks for, or ask for another model.", param="model")


_NO_FALLBACK = FallbackConfig()
