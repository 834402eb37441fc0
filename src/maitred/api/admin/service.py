"""Services that the admin routes call, as Protocols: `maitred.app.admin` implements them, above `api`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from maitred.wire.admin.cache import CacheBody, SelectAnswers
from maitred.wire.admin.live import LiveBody, PointBody
from maitred.wire.admin.requests import (
    PinPrefix,
    StartRollout,
    WeighRollout,
)
from maitred.wire.admin.responses import (
    AgentBody,
    ConfigBody,
    LoadableBody,
    LoadableList,
    PinBody,
    PoolBody,
    ReloadBody,
    ReplicaBody,
    RolloutBody,
    SleeperBody,
    TimelineBody,
    TimelineHead,
    WorkerBody,
)
from maitred.wire.admin.scaling import (
    ScalingBody,
    ScalingDecisionList,
    ScalingHistoryQuery,
    SetScalingOverride,
)
from maitred.wire.admin.semantic import (
    LabelledPairList,
    LabelledPairsQuery,
    ResetSemanticScopes,
    SelectSemanticScopes,
    SemanticScopeList,
    SemanticScopesQuery,
)


class CacheService(Protocol):
    """Service for the cache of answers of this gateway, or of all gateways that share a Redis.

    Scopes of similar questions are those of all gateways that share the database. Its methods raise StoreUnavailable if
    the Redis, or the database, is away.
    """

    async def describe(self) -> CacheBody:
        """Returns the state of the cache and what it keeps."""
        ...

    async def remove(self, selection: SelectAnswers) -> int:
        """Removes the selected answers and returns their number."""
        ...

    async def scopes(self, query: SemanticScopesQuery) -> SemanticScopeList:
        """Returns a page of scopes of similar questions."""
        ...

    async def labels(self, query: LabelledPairsQuery) -> LabelledPairList:
        """Returns a page of compared questions; `after` is empty or a number."""
        ...

    async def reset_scopes(self, selection: ResetSemanticScopes) -> int:
        """Lets the selected scopes begin anew and returns their number."""
        ...

    async def remove_scopes(self, selection: SelectSemanticScopes) -> int:
        """Deletes the selected scopes with all that they have learnt, and returns their number."""
        ...


class ConfigService(Protocol):
    """Service that shows and reloads the configuration of this gateway."""

    def running(self) -> ConfigBody:
        """Returns the configuration that is in force."""
        ...

    async def reload(self, *, dry_run: bool = False) -> ReloadBody:
        """Reloads the configuration and applies it; raises InvalidRequest with all its faults."""
        ...


class LiveService(Protocol):
    """Service of this gateway's live state."""

    async def snapshot(self) -> LiveBody:
        """Returns the live state of now."""
        ...

    def watching(self, key: str, *, is_operator: bool) -> AbstractContextManager[AsyncIterator[LiveBody]]:
        """Returns a context with the live state of now, and then again every second.

        Raises:
            Saturated: There are too many viewers.
        """
        ...

    def history(self) -> Sequence[PointBody]:
        """Returns the points of the last ten minutes, oldest second first."""
        ...


class OnDemandModels(Protocol):
    """Service for the models that are loaded on demand on this gateway's machine.

    Commands raise ResourceNotFound if no such model is loaded on demand, and Conflict if memory or a pin does not allow
    the command.
    """

    def all(self) -> LoadableList:
        """Lists the models that are loaded on demand, as they are now."""
        ...

    def load(self, model: str) -> LoadableBody:
        """Loads a model, as if a request waited for it."""
        ...

    def unload(self, model: str, *, hold: bool) -> LoadableBody:
        """Unloads a model after its running answers; with `hold`, it stays unloaded until a load is ordered."""
        ...

    def pin(self, model: str) -> LoadableBody:
        """Loads a model and never unloads it for other models."""
        ...

    def unpin(self, model: str) -> LoadableBody:
        """Allows a model to be unloaded when other models need its memory."""
        ...


class SleepableModels(Protocol):
    """Service for the models whose engines can sleep: all models on this gateway's own engines.

    Commands raise ResourceNotFound if no such model can sleep, and Conflict if the model is pinned.
    """

    @property
    def on_demand(self) -> OnDemandModels:
        """Service for those that are loaded on demand."""
        ...

    def all(self) -> list[SleeperBody]:
        """Lists the models that can sleep, as they are now."""
        ...

    def sleep(self, model: str) -> SleeperBody:
        """Puts a model to sleep after its running answers: its memory is freed, and its process stays."""
        ...

    def wake(self, model: str) -> SleeperBody:
        """Wakes a model, as a request would."""
        ...


class PinService(Protocol):
    """Service for the prefixes that this gateway has pinned."""

    def all(self) -> Sequence[PinBody]:
        """Lists the pins that have not expired."""
        ...

    async def pin(self, wish: PinPrefix, own_organisation: str) -> PinBody:
        """Computes and pins a prefix; it belongs to the caller's organisation if the wish names none."""
        ...

    def unpin(self, id_: str) -> None:
        """Removes a pin; raises ResourceNotFound if there is none with this id."""
        ...


class ScalingService(Protocol):
    """Service for the models whose number of replicas follows the demand.

    Methods with a model raise ResourceNotFound, and those that await raise StoreUnavailable.
    """

    def all(self) -> Sequence[ScalingBody]:
        """Lists the scaled models, as they are now."""
        ...

    async def decisions(self, query: ScalingHistoryQuery) -> ScalingDecisionList:
        """Returns a page of decisions of one model; `after` is empty or a number."""
        ...

    async def set_override(self, wish: SetScalingOverride) -> ScalingBody:
        """Sets the number of a model's replicas for a time; raises InvalidRequest if limits do not allow it."""
        ...

    async def end_override(self, model: str) -> ScalingBody:
        """Has the demand decide on the number of a model's replicas again."""
        ...


class ReplicaService(Protocol):
    """Service for all replicas of this gateway. A name of several replicas needs the model, too.

    Commands raise ResourceNotFound, or InvalidRequest if several replicas have the name.
    """

    @property
    def scaling(self) -> ScalingService:
        """Service for the models whose number of replicas follows the demand."""
        ...

    def all(self) -> Sequence[ReplicaBody]:
        """Lists the replicas, as they are now."""
        ...

    def pools(self) -> Sequence[PoolBody]:
        """Lists the models whose replicas come and go, with these replicas."""
        ...

    def agents(self) -> Sequence[AgentBody]:
        """Lists the agents that own replicas on other machines, also those that may not take part."""
        ...

    async def claim(self, model: str) -> None:
        """Has this gateway decide on the replicas of a model that it shares with others."""
        ...

    def scale(self, model: str, serving: int, asleep: int) -> PoolBody:
        """Sets how many replicas of a model serve, and how many sleep."""
        ...

    def drain(self, replica: str, model: str | None) -> ReplicaBody:
        """Sends a replica no new requests, and lets its running requests end."""
        ...

    def maintain(self, replica: str, model: str | None) -> ReplicaBody:
        """Sends a replica no new requests, and counts it as away at once."""
        ...

    def resume(self, replica: str, model: str | None) -> ReplicaBody:
        """Sends requests to a replica again."""
        ...


class TimelineStore(Protocol):
    """Store of the timelines of this gateway's last ended requests."""

    def latest(self, count: int | None = None) -> Sequence[TimelineHead]:
        """Lists the timelines that are kept, the latest first; with a count, only so many."""
        ...

    def get(self, request_id: str) -> TimelineBody:
        """Returns the latest timeline of a request id; raises ResourceNotFound if there is none."""
        ...


class RolloutService(Protocol):
    """Service for all rollouts.

    Methods with a name raise ResourceNotFound, and methods that change a rollout raise StoreUnavailable.
    """

    def all(self) -> Sequence[RolloutBody]:
        """Lists the rollouts, as they are now."""
        ...

    async def start(self, request: StartRollout) -> RolloutBody:
        """Starts a rollout, or starts it again."""
        ...

    async def weigh(self, name: str, request: WeighRollout) -> RolloutBody:
        """Sets the share of requests that the canary gets."""
        ...

    async def switch(self, name: str) -> RolloutBody:
        """Moves all requests to the canary for now."""
        ...

    async def promote(self, name: str) -> RolloutBody:
        """Moves all requests to the canary for good."""
        ...

    async def rollback(self, name: str) -> RolloutBody:
        """Moves all requests to the stable version."""
        ...

    async def end(self, name: str) -> RolloutBody:
        """Ends a rollout and removes it."""
        ...


class WorkerService(Protocol):
    """Service that lists and replaces the workers of this gateway."""

    def list_workers(self) -> Sequence[WorkerBody]:
        """Lists the workers as they are now; empty if the gateway is one process."""
        ...

    def replace_all(self) -> None:
        """Replaces the workers one after the other; raises Conflict if there are none.

        The call returns before the replacement is complete.
        """
        ...
