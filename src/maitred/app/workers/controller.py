"""Where the workers ask: the controller's end of every line, and the requests that came over it.

    worker -- Line -- Clerk -- Guest, one for each request at one model
                        |
                      Lobby, until the desk is open

A worker that is gone takes its requests with it: they end as if their callers had left, and nothing they held is held
any more.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from maitred.api.in_flight import InFlightLimiter
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.workers.context_codec import tally_of
from maitred.app.workers.ipc import IpcConnection
from maitred.app.workers.remote_request import RemoteRequest
from maitred.core.answer import RequestObserver
from maitred.core.clock import Clock
from maitred.core.errors import MaitredError, Unavailable
from maitred.core.tenancy import DirectoryChanges, DirectorySource
from maitred.core.timeline import TimelineSpan
from maitred.identity.refresh import DirectoryRefresher
from maitred.store.orphan_journal import SurvivingWork
from maitred.wire.error_codec import write_error
from maitred.wire.worker_protocol import (
    AdmitRejected,
    AdmitRequest,
    ControllerSnapshot,
    DirectoryAck,
    DirectoryQuery,
    DirectoryUpdate,
    RateLimitQuery,
    RateLimitReply,
    ReleaseRequest,
    ReplicaFailed,
    RequestEnded,
    ResumeGrant,
    SettleReply,
    SettleRequest,
    SubmissionAcked,
    ToController,
    TokensUsed,
    WorkerHello,
)

_SPREAD_S = 1.0
"""For workers to learn of a change; one that hangs holds up nobody longer."""
_log = logging.getLogger(__name__)


class WorkerSession:
    """One worker's. What it says before there is a desk is kept for then.

    Args:
        lobby: Where it waits for that.
    """

    def __init__(self, lobby: "PendingWorkers") -> None:
        self.line: IpcConnection[ToController] = IpcConnection(ToController, self._said, self._gone)
        self.worker = 0
        self.pid = 0
        self.brings: list[ResumeGrant] = []
        """What was granted before this controller, and goes on."""
        self.unanswered: list[str] = []
        """See `WorkerHello.unanswered`."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._lobby = lobby
        self._desk: ControllerServer | None = None
        self._early: list[ToController] = []
        self._guests: dict[int, RemoteRequest] = {}
        self._untold: dict[tuple[str, float], _PendingReport] = {}
        """Requests whose end observers have not been told, by their ids and when they came."""
        self._knows = asyncio.Condition()
        self._version = -1

    @property
    def desk(self) -> "ControllerServer":
        """Where it stands."""
        assert self._desk is not None, "it waits"
        return self._desk

    @property
    def requests(self) -> int:
        """Of its worker's, that wait or run."""
        return len(self._guests)

    def attend(self, desk: "ControllerServer") -> None:
        """Serves its worker from now on."""
        self._desk = desk
        desk.clerks.add(self)
        self.greet(desk.welcome())
        early, self._early = self._early, []
        for message in early:
            self._heard(message)

    async def resume(self, desk: "ControllerServer", resumes: ResumeGrant) -> None:
        """Grants again what was granted; returns when it is, or when it is settled if it has ended."""
        if resumes.lease in desk.carried:
            guest = RemoteRequest(resumes.asks, desk.control, desk.gate, desk.clock, self.line.tell, resumes)
            task = self._enter(guest)
            assert guest.resumed is not None
            resumed = asyncio.ensure_future(guest.resumed.wait())
            await asyncio.wait([task, resumed], return_when=asyncio.FIRST_COMPLETED)
            resumed.cancel()
            if resumes.ended is not None:
                guest.order(resumes.ended)
                if isinstance(resumes.ended, SettleRequest):
                    guest.order(ReleaseRequest(resumes.asks.number, resumes.ended.usage, resumes.ended.first_token_s))
                await asyncio.wait([task])
        else:
            self.forgo(resumes)

    def forgo(self, resumes: ResumeGrant) -> None:
        """The ledger has it already, as settled or as interrupted: what runs may run on, and what waits may not."""
        number = resumes.asks.number
        if resumes.replica:
            self.line.tell(SettleReply(number))
        else:
            self.line.tell(AdmitRejected(number, write_error(Unavailable(retry_after_s=1.0))))

    def greet(self, welcome: ControllerSnapshot) -> None:
        """Tells what has to be known."""
        self.line.tell(welcome)

    async def learnt(self, version: int) -> None:
        """Waits until the worker goes by a version of the directory."""
        async with self._knows:
            await self._knows.wait_for(lambda: self._version >= version or not self.line.open)

    def _said(self, message: ToController) -> None:
        if isinstance(message, WorkerHello):
            self.worker, self.pid = message.worker, message.pid
            self.brings, self.unanswered = message.resumes, message.unanswered
            self._lobby.entered(self)
        elif self._desk is None:
            self._early.append(message)
        else:
            self._heard(message)

    def _heard(self, message: ToController) -> None:
        match message:
            case TokensUsed():
                if (guest := self._guests.get(message.number)) is not None:
                    guest.took(message)
            case AdmitRequest():
                # It is known at once: what is said of it next may have come in the same moment.
                desk = self.desk
                guest = RemoteRequest(message, desk.control, desk.gate, desk.clock, self.line.tell)
                self._enter(guest)
            case SubmissionAcked():
                if (guest := self._guests.get(message.number)) is not None:
                    guest.heard()
            case ReplicaFailed() | SettleRequest() | ReleaseRequest():
                if (guest := self._guests.get(message.number)) is not None:
                    guest.order(message)
            case RequestEnded():
                self._report(message)
            case RateLimitQuery():
                self._begin(self._peek(message), "standing of a caller")
            case DirectoryQuery():
                self._begin(self._read(message), "changes of the directory")
            case DirectoryAck():
                self._begin(self._note(message.version), "version of the directory")
            case WorkerHello():
                pass  # it is here

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("What worker %d had asked for failed.", self.worker, exc_info=error)

    def _enter(self, guest: RemoteRequest) -> asyncio.Task[None]:
        asks = guest.asks
        self._guests[asks.number] = guest
        self._untold.setdefault((asks.request_id, asks.arrived_s), _PendingReport()).guests += 1
        return self._begin(self._serve(guest), f"request {asks.request_id}")

    async def _serve(self, guest: RemoteRequest) -> None:
        try:
            await guest.run()
        finally:
            self._leave(guest)

    def _leave(self, guest: RemoteRequest) -> None:
        asks = guest.asks
        del self._guests[asks.number]
        untold = self._untold[asks.request_id, asks.arrived_s]
        untold.guests -= 1
        untold.chapters += guest.chapters
        if untold.ended is not None:
            self._report(untold.ended)

    async def _peek(self, peeks: RateLimitQuery) -> None:
        self.line.tell(RateLimitReply(peeks.number, await self.desk.control.peek(peeks.principal, peeks.model)))

    async def _read(self, reads: DirectoryQuery) -> None:
        try:
            self.desk.refresher.check()
            # Most ask again and again, and nothing has changed.
            known = reads.since == self.desk.welcome().directory
            changes = DirectoryChanges(reads.since) if known else await self.desk.directory.changes(reads.since)
        except MaitredError as error:
            self.line.tell(DirectoryUpdate(reads.number, None, write_error(error)))
        else:
            self.line.tell(DirectoryUpdate(reads.number, changes))

    async def _note(self, version: int) -> None:
        async with self._knows:
            self._version = version
            self._knows.notify_all()

    def _report(self, ended: RequestEnded) -> None:
        request = ended.request_id, ended.started_s
        untold = self._untold.get(request)
        if untold is not None and untold.guests:
            untold.ended = ended  # it is about to leave, which is told, too
            return
        self._untold.pop(request, None)
        tally = tally_of(ended, () if untold is None else untold.chapters)
        for observer in self.desk.observers:
            observer.ended(tally)

    def _gone(self) -> None:
        """The worker has ended, or its line has: nobody is there for its requests."""
        self._lobby.left(self)
        if self._desk is not None:
            self._desk.clerks.discard(self)
        if self._guests:
            _log.warning("Worker %d (pid %d) is gone, with %d requests.", self.worker, self.pid, len(self._guests))
        for task in self.tasks:
            task.cancel()
        self._begin(self._note(self._version), "end of a line")


class PendingWorkers:
    """Takes lines from workers, with or without a desk.

    Attributes:
        clerks: Of those who are here and have said who they are.
    """

    def __init__(self) -> None:
        self.clerks: list[WorkerSession] = []
        self._desk: ControllerServer | None = None
        self._entering = asyncio.Event()

    @property
    def outlived(self) -> SurvivingWork:
        """What goes on of a controller that is dead."""
        return SurvivingWork(
            {resumes.lease for clerk in self.clerks for resumes in clerk.brings},
            {request_id for clerk in self.clerks for request_id in clerk.unanswered},
        )

    async def gathered(self, pids: Collection[int]) -> None:
        """Waits until all of these processes are here, or as good as dead."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while {pid for pid in pids if _alive(pid)} - {clerk.pid for clerk in self.clerks}:
                    self._entering.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._entering.wait(), _LOOK_S)

    def entered(self, clerk: WorkerSession) -> None:
        """Somebody has said who it is."""
        self.clerks.append(clerk)
        self._entering.set()
        if self._desk is not None:
            self._receive(clerk, self._desk)

    def left(self, clerk: WorkerSession) -> None:
        """Its line has ended."""
        if clerk in self.clerks:
            self.clerks.remove(clerk)

    def hand_over(self, desk: "ControllerServer") -> None:
        """From now on the desk serves all of them."""
        self._desk = desk
        for clerk in self.clerks:
            clerk.attend(desk)

    def _receive(self, clerk: WorkerSession, desk: "ControllerServer") -> None:
        """It comes late: what it brings was taken for interrupted, and is not billed."""
        for resumes in clerk.brings:
            clerk.forgo(resumes)
        clerk.attend(desk)


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


_PATIENCE_S = 5.0
"""For a worker that lives and does not come; it tries twenty times a second."""
_LOOK_S = 0.1
"""How soon it is noticed that one of them has died meanwhile."""


@asynccontextmanager
async def open_lobby(path: Path) -> AsyncIterator[PendingWorkers]:
    """Takes lines at a socket for as long as the block lasts."""
    lobby = PendingWorkers()
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: WorkerSession(lobby).line, str(path))
    try:
        yield lobby
    finally:
        server.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _PendingReport(msgspec.Struct):
    """What the controller knows of a request; its end may be said before all of that is known."""

    guests: int = 0
    """At one model after another, those that have not left."""
    chapters: list[TimelineSpan] = []
    """Of those that have."""
    ended: RequestEnded | None = None
