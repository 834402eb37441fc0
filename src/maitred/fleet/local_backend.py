"""Backend of engines that this process keeps itself: processes of this machine, or engines at known addresses.

It makes an engine for each replica that is started. A local engine is a process, which ends with the replica; a remote
engine is a connection, and the engine itself goes on without it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from maitred.core.clock import Clock
from maitred.core.errors import ReplicaUnavailable
from maitred.fleet.backend import BackendFacts, BackendReplica, ManagedEngine, StartPhase
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.process import Backoff
from maitred.scaling.replica_status import ReplicaPhase

_log = logging.getLogger(__name__)


class LocalBackend:
    """Backend that keeps one `LocalEngine` or `RemoteEngine` for each replica. Implements `ReplicaBackend`.

    Args:
        make_engine: Makes the engine of a replica; it is entered here.
        facts: The facts.
        name_of: Returns the name of the replica of a number.
        clock: The clock.
        sleep: Waits before an engine that could not be entered is entered again.

    Attributes:
        has_started: Whether a replica has been ready once, so that a start that fails now is tried again.
    """

    def __init__(
        self,
        make_engine: Callable[[str], ManagedEngine],
        facts: BackendFacts,
        name_of: Callable[[int], str],
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.has_started = False
        self._make_engine = make_engine
        self._facts = facts
        self._name_of = name_of
        self._clock = clock
        self._sleep = sleep
        self._replicas: dict[str, BackendReplica] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped: dict[str, asyncio.Event] = {}
        self._listeners: list[Callable[[], None]] = []
        self._first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def facts(self) -> BackendFacts:
        """Facts about the backend. Implements `ReplicaBackend`."""
        return self._facts

    @property
    def desired(self) -> None:
        """Returns None: it has nothing before it is opened. Implements `ReplicaBackend`."""

    @property
    def is_ready(self) -> bool:
        """Whether any of the replicas would take a request now."""
        return any(replica.engine is not None and replica.engine.client.is_ready for replica in self._replicas.values())

    def replicas(self) -> Mapping[str, BackendReplica]:
        """Returns the replicas that exist, by name. Implements `ReplicaBackend`."""
        return self._replicas

    def name_of(self, number: int) -> str:
        """Returns the name of the replica of this number. Implements `ReplicaBackend`."""
        return self._name_of(number)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change. Implements `ReplicaBackend`."""
        self._listeners.append(listener)

    # --- orders ---

    def keep_desired(self, desired: DesiredReplicas) -> None:
        """Does nothing: it ends with this process. Implements `ReplicaBackend`."""

    def keep_leaving(self, names: Collection[str]) -> None:
        """Does nothing: no other gateway has its replicas. Implements `ReplicaBackend`."""

    def keep_asleep(self, names: Collection[str]) -> None:
        """Does nothing: the pool tells the engines itself. Implements `ReplicaBackend`."""

    def start(self, name: str) -> None:
        """Starts a replica. Implements `ReplicaBackend`."""
        if name in self._replicas:
            return
        engine = self._make_engine(name)
        now_s = self._clock.monotonic_s()
        self._replicas[name] = BackendReplica(
            name=name,
            phase=ReplicaPhase.STARTING,
            since_s=now_s,
            engine=engine,
            start_kind=self._facts.start_kind,
        )
        engine.on_transition = lambda: self._on_transition(name, engine)
        self._stopped[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, engine, self._stopped[name]), name=f"replica {name}")
        self._notify()

    def stop(self, name: str) -> None:
        """Stops a replica. Implements `ReplicaBackend`."""
        if name in self._replicas and not self._stopped[name].is_set():
            self._stopped[name].set()
            self._change(name, ReplicaPhase.DRAINING)

    async def wait_started(self) -> None:
        """Waits until one of the replicas has been ready. Implements `ReplicaBackend`."""
        await asyncio.shield(self._first_start)

    async def __aenter__(self) -> Self:
        """Opens the backend, which has no replica yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops all replicas, and raises what a task of theirs has raised."""
        tasks = list(self._tasks.values())
        for name in list(self._replicas):
            self.stop(name)
        if tasks:
            await asyncio.wait(tasks)
        if error is None:
            for task in tasks:
                task.result()

    # --- one replica ---

    async def _run(self, name: str, engine: ManagedEngine, stopped: asyncio.Event) -> None:
        stopping = asyncio.create_task(stopped.wait(), name=f"end of {name}")
        try:
            if not await self._enter(name, engine, stopping):
                return
            async with AsyncExitStack() as stack:
                stack.push_async_exit(engine)
                starting = asyncio.create_task(engine.wait_started(), name=f"start of {name}")
                stack.callback(starting.cancel)
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not stopping.done() and (failure := starting.exception()) is not None:
                    self._on_start_failed(name, failure)
                await stopping
        finally:
            stopping.cancel()
            for entries in (self._replicas, self._tasks, self._stopped):
                del entries[name]
            self._notify()

    async def _enter(self, name: str, engine: ManagedEngine, stopping: asyncio.Task[bool]) -> bool:
        """Enters an engine, again and again until it can be entered; returns False if the replica is stopped first.

        The cause of a failure, such as a full disk, is none of the engine's own, so it may go away.
        """
        backoff = Backoff()
        while not stopping.done():
            try:
                await engine.__aenter__()
            except Exception as failure:  # whatever it is, the pool would order the same start again at once
                _log.exception("The start of replica %s has failed, and is tried again.", name)
                self._on_start_failed(name, failure)
            else:
                self._on_transition(name, engine)
                return True
            pause = asyncio.ensure_future(self._sleep(backoff.wait_s(0.0)))
            await asyncio.wait({pause, stopping}, return_when=asyncio.FIRST_COMPLETED)
            pause.cancel()
        return False

    def _on_start_failed(self, name: str, failure: BaseException) -> None:
        """Handles a start that has failed, and tells those who wait for the first one."""
        if not isinstance(failure, ReplicaUnavailable):
            failure = ReplicaUnavailable(f"The engine did not start: {failure}")
        if not self._first_start.done():
            self._first_start.set_exception(failure)
            self._first_start.exception()  # marked as retrieved: `wait_started` need not be awaited
        if not self._stopped[name].is_set():
            self._change(name, ReplicaPhase.FAILED, failure.message)

    def _on_transition(self, name: str, engine: ManagedEngine) -> None:
        if not self._stopped[name].is_set():
            self._change(name, engine.phase, engine.failure_reason)

    def _change(self, name: str, phase: ReplicaPhase, failure: str = "") -> None:
        replica, now_s = self._replicas[name], self._clock.monotonic_s()
        if (phase, failure) == (replica.phase, replica.failure):
            return
        start_phases = replica.start_phases
        if phase is ReplicaPhase.SERVING:
            self.has_started = True
            if not self._first_start.done():
                self._first_start.set_result(None)
            if replica.phase is ReplicaPhase.STARTING:
                start_phases = _start_phases(replica, now_s - replica.since_s)
        self._replicas[name] = replace(replica, phase=phase, since_s=now_s, failure=failure, start_phases=start_phases)
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


def _start_phases(replica: BackendReplica, seconds: float) -> tuple[StartPhase, ...]:
    """Returns the parts of a start that is complete: the process with its code, then its model."""
    assert replica.engine is not None
    model_s = min(seconds, replica.engine.client.model_s)
    return StartPhase(name="process", seconds=seconds - model_s), StartPhase(name="model", seconds=model_s)
