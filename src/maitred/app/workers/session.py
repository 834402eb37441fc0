"""The controller's end of the line to one worker, and the requests that came over it."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from maitred.app.workers.context_codec import tally_of
from maitred.app.workers.line import IpcConnection
from maitred.app.workers.remote_request import RemoteRequest
from maitred.core.directory import DirectoryChanges
from maitred.core.errors import MaitredError, Unavailable
from maitred.core.timeline import TimelineSpan
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

if TYPE_CHECKING:
    from maitred.app.workers.controller import ControllerServer
    from maitred.app.workers.lobby import PendingWorkers

_log = logging.getLogger(__name__)


class _PendingReport(msgspec.Struct):
    """What the controller knows of a request; its end may be said before all of that is known."""

    guests: int = 0
    """At one model after another, those that have not left."""
    chapters: list[TimelineSpan] = []
    """Of those that have."""
    ended: RequestEnded | None = None


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
