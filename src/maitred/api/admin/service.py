"""Services that the admin routes call, as Protocols: `maitred.app.admin` implements them, above `api`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from maitred.wire.admin.live import LiveBody, PointBody
from maitred.wire.admin.requests import (
    PinPrefix,
    StartRollout,
    WeighRollout,
)
from maitred.wire.admin.responses import (
    ConfigBody,
    LoadableBody,
    LoadableList,
    PinBody,
    ReloadBody,
    ReplicaBody,
    RolloutBody,
    SleeperBody,
    TimelineBody,
    TimelineHead,
    WorkerBody,
)


class ConfigService(Protocol):
    """Service that shows and reloads the configuration of this gateway."""

    def running(self) -> ConfigBody:
        """Returns the configuration that is in force."""
        ...

    async def reload(self, *, dry_run: bool = False) -> ReloadBody:
        """Reads it again and puts it in force; raises InvalidRequest with all its faults."""
        ...


class LiveService(Protocol):
    """The state of this gateway."""

    async def snapshot(self) -> LiveBody:
        """Returns the live state of now."""
        ...

    def watching(self) -> AbstractContextManager[AsyncIterator[LiveBody]]:
        """Returns a context with the live state of now, and then again every second.

        Raises:
            Saturated: Too many watch.
        """
        ...

    def history(self) -> Sequence[PointBody]:
        """The last ten minutes, oldest second first."""
        ...


class OnDemandModels(Protocol):
    """The models that come and go on this gateway's machine.

    What changes one raises ResourceNotFound where no such model comes and goes, and Conflict where memory, or what is
    pinned, does not allow it.
    """

    def all(self) -> LoadableList:
        """Lists the models that are loaded on demand, as they are now."""
        ...

    def load(self, model: str) -> LoadableBody:
        """Loads it, as if a request waited for it."""
        ...

    def unload(self, model: str, *, hold: bool) -> LoadableBody:
        """Lets its answers end and gives its memory back; held, it stays away until it is told to come."""
        ...

    def pin(self, model: str) -> LoadableBody:
        """Loads it, and never unloads it for others."""
        ...

    def unpin(self, model: str) -> LoadableBody:
        """Lets it go when others need its room."""
        ...


class SleepableModels(Protocol):
    """The models whose engines can sleep: all that run on our own.

    What changes one raises ResourceNotFound where no such model can sleep, and Conflict where it is pinned.
    """

    def all(self) -> list[SleeperBody]:
        """Lists the models that can sleep, as they are now."""
        ...

    def sleep(self, model: str) -> SleeperBody:
        """Lets its answers end, and gives its memory back but for its process."""
        ...

    def wake(self, model: str) -> SleeperBody:
        """Has it serve again, as a request would."""
        ...


class PinService(Protocol):
    """The prefixes that this gateway has pinned."""

    def all(self) -> Sequence[PinBody]:
        """Lists the pins that have not expired."""
        ...

    async def pin(self, wish: PinPrefix, own_organisation: str) -> PinBody:
        """Has a prefix computed and kept; for the caller's own organisation where the wish names none."""
        ...

    def unpin(self, id_: str) -> None:
        """Lets it go; raises ResourceNotFound where there is none of that id."""
        ...


class ReplicaService(Protocol):
    """All replicas of this gateway. A name stands for a replica; the model is needed where it stands for several.

    What changes one raises ResourceNotFound, or InvalidRequest where the name is that of several.
    """

    def all(self) -> Sequence[ReplicaBody]:
        """Lists the replicas, as they are now."""
        ...

    def drain(self, replica: str, model: str | None) -> ReplicaBody:
        """Gives it nothing new, and lets what runs there end."""
        ...

    def maintain(self, replica: str, model: str | None) -> ReplicaBody:
        """Gives it nothing new, and counts it as away at once."""
        ...

    def resume(self, replica: str, model: str | None) -> ReplicaBody:
        """Gives it requests again."""
        ...


class TimelineStore(Protocol):
    """The last requests of this gateway that have ended."""

    def latest(self) -> Sequence[TimelineHead]:
        """Lists the timelines that are kept, the latest first."""
        ...

    def get(self, request_id: str) -> TimelineBody:
        """The latest of that id; raises ResourceNotFound where none is known."""
        ...


class RolloutService(Protocol):
    """All rollouts. What takes a name raises ResourceNotFound, and what changes one StoreUnavailable."""

    def all(self) -> Sequence[RolloutBody]:
        """Lists the rollouts, as they are now."""
        ...

    async def start(self, request: StartRollout) -> RolloutBody:
        """Begins one, or one anew."""
        ...

    async def weigh(self, name: str, request: WeighRollout) -> RolloutBody:
        """Gives the canary another share."""
        ...

    async def switch(self, name: str) -> RolloutBody:
        """Gives the canary everybody, for now."""
        ...

    async def promote(self, name: str) -> RolloutBody:
        """Gives the canary everybody, for good."""
        ...

    async def rollback(self, name: str) -> RolloutBody:
        """Gives the stable version everybody."""
        ...

    async def end(self, name: str) -> RolloutBody:
        """Ends a rollout and removes it."""
        ...


class WorkerService(Protocol):
    """Service that lists and restarts the workers of this gateway."""

    def all(self) -> Sequence[WorkerBody]:
        """Lists the workers, as they are now; none where the gateway is one process."""
        ...

    def restart(self) -> None:
        """Has them replaced, one after the other; raises Conflict where there are none. Returns before it is done."""
        ...
