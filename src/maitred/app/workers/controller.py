"""Where the workers ask: the controller's end of every line, and the requests that came over it.

    worker -- Line -- Clerk -- Guest, one for each request at one model
                        |
                      Lobby, until the desk is open

A worker that is gone takes its requests with it: they end as if their callers had left, and nothing they held is held
any more.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from maitred.api.in_flight import InFlightLimiter
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.workers.lobby import PendingWorkers
from maitred.app.workers.session import WorkerSession
from maitred.core.answer import RequestObserver
from maitred.core.clock import Clock
from maitred.core.directory import DirectorySource
from maitred.identity.refresh import DirectoryRefresher
from maitred.wire.worker_protocol import ControllerSnapshot

_SPREAD_S = 1.0
"""For workers to learn of a change; one that hangs holds up nobody longer."""
_log = logging.getLogger(__name__)


class ControllerServer:
    """Serves all workers.

    Args:
        gate: Counts their requests among those who are inside.
        directory: Keys, tenants and limits, as they are kept.
        refresher: Keeps up with them here.
        welcome: What a worker has to know, as it is now.
        clock: For stories.
    """

    def __init__(
        self,
        gate: InFlightLimiter,
        directory: DirectorySource,
        refresher: DirectoryRefresher,
        welcome: Callable[[], ControllerSnapshot],
        clock: Clock,
    ) -> None:
        self.gate = gate
        self.directory = directory
        self.refresher = refresher
        self.observers: Sequence[RequestObserver] = ()
        self._control: LocalFlowController | None = None
        self.welcome = welcome
        self.clock = clock
        self.clerks: set[WorkerSession] = set()
        self.carried: Collection[str] = ()
        """Leases that the ledger has carried over from a controller that is dead."""
        self._said: ControllerSnapshot | None = None

    @property
    def control(self) -> LocalFlowController:
        """Decides, by the settings of now."""
        assert self._control is not None, "nobody decides yet"
        return self._control

    def adopt(self, control: LocalFlowController, observers: Sequence[RequestObserver]) -> None:
        """Another configuration is in force: these decide, and are told of every request that has ended."""
        self._control, self.observers = control, observers

    @property
    def workers(self) -> list[tuple[int, int]]:
        """Those that are here: their numbers and process ids."""
        return sorted((clerk.worker, clerk.pid) for clerk in self.clerks if clerk.pid)

    async def open(self, lobby: PendingWorkers, carried: Collection[str]) -> None:
        """Serves who waits in the lobby, and who comes from now on.

        What was granted by a controller that is dead, and goes on, is granted again before anybody is asked what it
        wants: first what runs, then what waits, in the order in which it came.

        Args:
            lobby: Where workers are.
            carried: Leases that the ledger has carried over.
        """
        self.carried = carried
        resuming = sorted(
            ((resumes, clerk) for clerk in lobby.clerks for resumes in clerk.brings),
            key=lambda each: (not each[0].replica, each[0].asks.arrived_s),
        )
        for resumes, clerk in resuming:
            await clerk.resume(self, resumes)
        if resuming:
            _log.warning("%d requests of a controller that is dead go on with this one.", len(resuming))
        lobby.hand_over(self)

    def greet(self) -> None:
        """Something in the welcome has changed."""
        self._said = welcome = self.welcome()
        for clerk in self.clerks:
            clerk.greet(welcome)

    def look(self) -> None:
        """Something in the welcome may have changed."""
        if self.clerks and self.welcome() != self._said:
            self.greet()

    async def load(self) -> None:
        """Reads what has changed of keys, tenants and limits; returns when every worker goes by it.

        Raises:
            StoreUnavailable: They cannot be read.
        """
        await self.refresher.load()
        self.greet()
        version = self.welcome().directory
        learning = [asyncio.ensure_future(clerk.learnt(version)) for clerk in self.clerks]
        if learning:
            await asyncio.wait(learning, timeout=_SPREAD_S)
        for each in learning:
            each.cancel()

    async def close(self) -> None:
        """Ends every line."""
        for clerk in list(self.clerks):
            clerk.line.close()
        await asyncio.gather(*(task for clerk in self.clerks for task in clerk.tasks), return_exceptions=True)
