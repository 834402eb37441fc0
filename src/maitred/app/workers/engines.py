"""Engines of the `model` section in a worker: its own connections, which follow the controller's snapshots."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType

from maitred.app.workers.controller_client import ControllerClient
from maitred.app.workers.remote_flow import SubmissionAcker
from maitred.core.clock import Clock
from maitred.dispatch.request import AnyEndpoint, Endpoint
from maitred.fleet.backend import BackendFacts, ManagedEngine
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.remote import RemoteEngine
from maitred.fleet.sleepable_replica import SleepableReplica
from maitred.wire.worker_protocol import ControllerSnapshot


class WorkerEngines(AbstractAsyncContextManager["WorkerEngines"]):
    """Connections of a worker to the engines that its controller has. Leaving the context closes them.

    A connection to an engine that the controller has no more is kept until its last stream has ended.

    Args:
        make_engine: Makes the connection to the engine at an address.
        controller: Is told which submissions the engines have received.
        pause_at_tokens: Number of unread tokens at which a stream pauses its engine.
        clock: The clock.
        region: Region of engines that tell none; None: it has no name.

    Attributes:
        engines: Connections by replica. This object and the next two stay the same.
        endpoints: Endpoints by replica; those of engines that are gone take no request.
        submission_ackers: Submission ackers by replica.
        pool_stays_ready: Whether the model is ready while no engine serves, as the controller says.
    """

    def __init__(
        self,
        make_engine: Callable[[str], RemoteEngine],
        controller: ControllerClient,
        pause_at_tokens: int,
        clock: Clock,
        region: str | None = None,
    ) -> None:
        self._region = region
        self.engines: dict[str, ManagedEngine] = {}
        self.endpoints: dict[str, AnyEndpoint] = {}
        self.submission_ackers: dict[str, SubmissionAcker] = {}
        self.pool_stays_ready = False
        self._controller = controller
        self._pause_at_tokens = pause_at_tokens
        self._addresses: dict[str, str] = {}
        self._connections = LocalBackend(
            lambda name: make_engine(self._addresses[name]), BackendFacts(max_replicas=0), str, clock
        )
        self._connections.on_change(self._add_missing)

    async def __aenter__(self) -> "WorkerEngines":
        await self._connections.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._addresses = {}
        await self._connections.__aexit__(kind, error, trace)

    def on_snapshot(self, snapshot: ControllerSnapshot) -> None:
        """Follows the engines of the controller."""
        self.pool_stays_ready = snapshot.stays_ready
        before, self._addresses = self._addresses, snapshot.engines
        for name in [name for name in self.engines if before.get(name) != snapshot.engines.get(name)]:
            engine = self.engines.pop(name)
            # The endpoint stays: the controller may have sent a request there just before the engine was lost. That
            # request finds it closed, and is requeued.
            del self.submission_ackers[name]
            engine.client.on_idle = partial(self._close_if_idle, name, engine)
            self._close_if_idle(name, engine)
        self._add_missing()

    def _close_if_idle(self, name: str, engine: ManagedEngine) -> None:
        replica = self._connections.replicas().get(name)
        if replica is not None and replica.engine is engine and not engine.client.open_streams:
            self._connections.stop(name)

    def _add_missing(self) -> None:
        for name in [name for name in self._addresses if name not in self.engines]:
            if name in self._connections.replicas():
                continue  # an earlier connection of this name is being closed, and its end calls again
            self._connections.start(name)
            engine = self._connections.replicas()[name].engine
            assert engine is not None
            engine.client.pause_at_tokens = self._pause_at_tokens
            self.engines[name] = engine
            self.endpoints[name] = Endpoint(name, SleepableReplica(engine.client), region=self._region)
            self.submission_ackers[name] = SubmissionAcker(engine.client, self._controller)
