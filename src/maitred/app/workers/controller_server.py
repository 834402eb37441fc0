"""The controller's end of every worker connection, and the requests that came over it.

    worker -- MessageConnection -- WorkerSession -- WorkerRequest, one for each request at one model
                                    |
                              WorkerSessions    those of all workers, also before the controller is open
                                    |
                              ControllerServer  serves them once it is open

When a worker process ends, its requests end with it: each fails, all that it held is released, and nothing is billed.
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
from maitred.app.workers.answer_peers import ControllerPeers
from maitred.app.workers.context_codec import decode_context
from maitred.app.workers.worker_request import WorkerRequest
from maitred.cache.answer_key import AnswerKey
from maitred.cache.backend import AnswerBackend
from maitred.core.clock import Clock
from maitred.core.context import RequestObserver
from maitred.core.errors import MaitredError, ReplicaLost, Unavailable
from maitred.core.tenancy import DirectoryChanges, DirectorySource
from maitred.core.timeline import TimelineSpan
from maitred.fleet.agent.connection import MessageConnection
from maitred.identity.identity import DirectoryRefresher
from maitred.store.orphan_journal import SurvivingWork
from maitred.wire.error_codec import encode_error
from maitred.wire.worker_protocol import (
    AdmitRejected,
    AdmitRequest,
    AnswerClaim,
    AnswerEnded,
    AnswerPart,
    AnswerQuery,
    AnswerReleased,
    AnswerReply,
    AnswerStored,
    ControllerSnapshot,
    DirectoryAck,
    DirectoryQuery,
    DirectoryReply,
    LimitQuery,
    LimitReply,
    RateLimitQuery,
    RateLimitReply,
    ReaderLeft,
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
    WorkerRetires,
)

_DIRECTORY_ACK_TIMEOUT_S = 1.0
"""How long a directory change waits for each worker's acknowledgement; a hanging worker delays no change longer."""
_log = logging.getLogger(__name__)


class WorkerSession:
    """The controller's session with one worker. Messages that arrive before the controller is open are queued.

    Args:
        worker_sessions: Holds the session while the worker is connected.
    """

    def __init__(self, worker_sessions: "WorkerSessions") -> None:
        self.connection: MessageConnection[ToController] = MessageConnection(
            ToController, self._on_message, self._on_disconnect
        )
        self.worker = 0
        self.pid = 0
        self.resume_grants: list[ResumeGrant] = []
        """Grants of an earlier controller, from `WorkerHello.resume_grants`."""
        self.unanswered_ids: list[str] = []
        """Ids of requests without a reply; `WorkerHello.unanswered_ids`."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._worker_sessions = worker_sessions
        self._controller: ControllerServer | None = None
        self._early_messages: list[ToController] = []
        self._requests: dict[int, WorkerRequest] = {}
        self._pending_reports: dict[tuple[str, float], _PendingReport] = {}
        """Requests whose end is not reported to the observers yet, by request id and start time."""
        self._directory_acked = asyncio.Condition()
        self._directory_version = -1

    @property
    def controller(self) -> "ControllerServer":
        """The controller that serves this session; asserts that there is one."""
        assert self._controller is not None, "the controller is not open yet"
        return self._controller

    @property
    def requests(self) -> int:
        """The number of this worker's requests that wait or run."""
        return len(self._requests)

    def start(self, controller: "ControllerServer") -> None:
        """Starts serving the worker, beginning with the messages that were kept."""
        self._controller = controller
        controller.sessions.add(self)
        self.send_snapshot(controller.make_snapshot())
        messages, self._early_messages = self._early_messages, []
        for message in messages:
            self._handle(message)

    async def resume(self, controller: "ControllerServer", resume_grant: ResumeGrant) -> None:
        """Takes over a grant of an earlier controller; returns when the request has resumed.

        A request that has ended since is settled or released before this returns.
        """
        if resume_grant.lease in controller.surviving_leases:
            worker_request = WorkerRequest(
                admit_request=resume_grant.admit_request,
                flow_controller=controller.flow_controller,
                in_flight=controller.in_flight,
                clock=controller.clock,
                send=self.connection.send,
                resume_grant=resume_grant,
            )
            task = self._add_request(worker_request)
            assert worker_request.resume_done is not None
            resumed_task = asyncio.ensure_future(worker_request.resume_done.wait())
            await asyncio.wait([task, resumed_task], return_when=asyncio.FIRST_COMPLETED)
            resumed_task.cancel()
            if resume_grant.ended is not None:
                worker_request.on_command(resume_grant.ended)
                if isinstance(resume_grant.ended, SettleRequest):
                    worker_request.on_command(
                        ReleaseRequest(
                            resume_grant.admit_request.number,
                            resume_grant.ended.usage,
                            resume_grant.ended.first_token_s,
                        )
                    )
                await asyncio.wait([task])
        else:
            self.decline_resume(resume_grant)

    def decline_resume(self, resume_grant: ResumeGrant) -> None:
        """Declines to resume a grant that the ledger has already closed as settled or interrupted.

        A request that runs may run on; a request that waits is rejected.
        """
        number = resume_grant.admit_request.number
        if resume_grant.replica or resume_grant.admit_request.cache:
            self.connection.send(SettleReply(number))
        else:
            self.connection.send(AdmitRejected(number, encode_error(Unavailable(retry_after_s=1.0))))

    def send_snapshot(self, snapshot: ControllerSnapshot) -> None:
        """Sends a snapshot to the worker."""
        self.connection.send(snapshot)

    async def wait_directory_version(self, version: int) -> None:
        """Waits until the worker uses at least this version of the directory, or is disconnected."""
        async with self._directory_acked:
            await self._directory_acked.wait_for(
                lambda: self._directory_version >= version or not self.connection.is_open
            )

    def _on_message(self, message: ToController) -> None:
        if isinstance(message, WorkerHello):
            self.worker, self.pid = message.worker, message.pid
            self.resume_grants, self.unanswered_ids = message.resume_grants, message.unanswered_ids
            self._worker_sessions.on_connect(self)
        elif self._controller is None:
            self._early_messages.append(message)
        else:
            self._handle(message)

    def _handle(self, message: ToController) -> None:
        match message:
            case TokensUsed():
                if (worker_request := self._requests.get(message.number)) is not None:
                    worker_request.charge_tokens(message)
            case AdmitRequest():
                # Registered at once: the next message about it may be in the same read.
                controller = self.controller
                worker_request = WorkerRequest(
                    admit_request=message,
                    flow_controller=controller.flow_controller,
                    in_flight=controller.in_flight,
                    clock=controller.clock,
                    send=self.connection.send,
                )
                self._add_request(worker_request)
            case SubmissionAcked():
                if (worker_request := self._requests.get(message.number)) is not None:
                    worker_request.on_submission_acked()
            case ReplicaFailed() | SettleRequest() | ReleaseRequest():
                if (worker_request := self._requests.get(message.number)) is not None:
                    worker_request.on_command(message)
            case RequestEnded():
                self._report_end(message)
            case RateLimitQuery():
                self._start_task(self._reply_rate_limits(message), "reply about rate limits")
            case LimitQuery():
                self._start_task(self._reply_limits(message), "reply about limits")
            case AnswerQuery():
                self._start_task(self._reply_answer(message), "reply about an answer in the cache")
            case AnswerStored():
                self.controller.answers.put(
                    _key_of(message), message.answer, message.ttl_s, message.fingerprint, message.since_s
                )
            case AnswerClaim() | AnswerReleased() | AnswerPart() | AnswerEnded() | ReaderLeft():
                self.controller.answer_peers.handle(self.connection, message)
            case DirectoryQuery():
                self._start_task(self._reply_directory(message), "reply about the directory")
            case DirectoryAck():
                self._start_task(self._set_directory_version(message.version), "directory version of a worker")
            case WorkerRetires():
                self.controller.on_worker_retires(self.pid)
            case WorkerHello():
                pass  # handled in _on_message

    def _start_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("What worker %d had asked for failed.", self.worker, exc_info=error)

    def _add_request(self, worker_request: WorkerRequest) -> asyncio.Task[None]:
        admit_request = worker_request.admit_request
        self._requests[admit_request.number] = worker_request
        self._pending_reports.setdefault(
            (admit_request.request_id, admit_request.arrived_s), _PendingReport()
        ).active_requests += 1
        return self._start_task(self._serve(worker_request), f"request {admit_request.request_id}")

    async def _serve(self, worker_request: WorkerRequest) -> None:
        try:
            await worker_request.run()
        finally:
            self._remove_request(worker_request)

    def _remove_request(self, worker_request: WorkerRequest) -> None:
        admit_request = worker_request.admit_request
        del self._requests[admit_request.number]
        pending_report = self._pending_reports[admit_request.request_id, admit_request.arrived_s]
        pending_report.active_requests -= 1
        pending_report.spans += worker_request.spans
        if pending_report.request_ended is not None:
            self._report_end(pending_report.request_ended)

    async def _reply_rate_limits(self, query: RateLimitQuery) -> None:
        self.connection.send(
            RateLimitReply(
                query.number, await self.controller.flow_controller.rate_limit_status(query.principal, query.model)
            )
        )

    async def _reply_limits(self, query: LimitQuery) -> None:
        error = None
        try:
            await self.controller.flow_controller.check_limits(query.principal, query.least_output)
        except MaitredError as reached:
            error = encode_error(reached)
        self.connection.send(LimitReply(query.number, error))

    async def _reply_answer(self, query: AnswerQuery) -> None:
        stored = await self.controller.answers.get(_key_of(query))
        if stored is None:
            self.connection.send(AnswerReply(query.number))
        else:
            self.connection.send(AnswerReply(query.number, stored.data, stored.fingerprint))

    async def _reply_directory(self, query: DirectoryQuery) -> None:
        try:
            self.controller.refresher.check()
            # Most queries come again and again while nothing has changed.
            unchanged = query.since == self.controller.make_snapshot().directory_version
            changes = (
                DirectoryChanges(query.since) if unchanged else await self.controller.directory.changes(query.since)
            )
        except MaitredError as error:
            self.connection.send(DirectoryReply(query.number, None, encode_error(error)))
        else:
            self.connection.send(DirectoryReply(query.number, changes))

    async def _set_directory_version(self, version: int) -> None:
        async with self._directory_acked:
            self._directory_version = version
            self._directory_acked.notify_all()

    def _report_end(self, request_ended: RequestEnded) -> None:
        report_key = request_ended.request_id, request_ended.started_s
        pending_report = self._pending_reports.get(report_key)
        if pending_report is not None and pending_report.active_requests:
            pending_report.request_ended = request_ended  # reported once the request is removed here, with its spans
            return
        self._pending_reports.pop(report_key, None)
        context = decode_context(request_ended, () if pending_report is None else pending_report.spans)
        for observer in self.controller.observers:
            observer.on_request_end(context)

    def _on_disconnect(self) -> None:
        """Handles the end of the connection or of the worker: its requests fail, and so nobody pays for them."""
        self._worker_sessions.on_disconnect(self)
        if self._controller is not None:
            self._controller.sessions.discard(self)
            self._controller.answer_peers.on_disconnect(self.connection)
        if self._requests:
            _log.warning("Worker %d (pid %d) is gone, with %d requests.", self.worker, self.pid, len(self._requests))
        for task in self.tasks:
            task.cancel(ReplicaLost("The process that answered this request has ended."))
        self._start_task(self._set_directory_version(self._directory_version), "end of a worker connection")


class WorkerSessions:
    """The sessions of all workers, with or without an open controller.

    Attributes:
        sessions: The sessions of workers that are connected and have sent their `WorkerHello`.
    """

    def __init__(self) -> None:
        self.sessions: list[WorkerSession] = []
        self._controller: ControllerServer | None = None
        self._session_added = asyncio.Event()

    @property
    def surviving_work(self) -> SurvivingWork:
        """Requests of a dead controller that continue in the workers."""
        return SurvivingWork(
            {resume_grant.lease for session in self.sessions for resume_grant in session.resume_grants},
            {request_id for session in self.sessions for request_id in session.unanswered_ids},
        )

    async def wait_connected(self, pids: Collection[int]) -> None:
        """Waits until each of these processes is connected, has ended, or has exceeded `_WORKER_CONNECT_TIMEOUT_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_WORKER_CONNECT_TIMEOUT_S):
                while {pid for pid in pids if _is_alive(pid)} - {session.pid for session in self.sessions}:
                    self._session_added.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._session_added.wait(), _LIVENESS_INTERVAL_S)

    def on_connect(self, session: WorkerSession) -> None:
        """Adds the session of a worker that has sent its `WorkerHello`."""
        self.sessions.append(session)
        self._session_added.set()
        if self._controller is not None:
            self._attach_late_worker(session, self._controller)

    def on_disconnect(self, session: WorkerSession) -> None:
        """Removes a session whose connection has ended."""
        if session in self.sessions:
            self.sessions.remove(session)

    def attach_controller(self, controller: "ControllerServer") -> None:
        """Attaches the controller, which serves all sessions from now on."""
        self._controller = controller
        for session in self.sessions:
            session.start(controller)

    def _attach_late_worker(self, session: WorkerSession, controller: "ControllerServer") -> None:
        """Attaches a late worker: its grants have already been closed as interrupted, and are not billed."""
        for resume_grant in session.resume_grants:
            session.decline_resume(resume_grant)
        session.start(controller)


class ControllerServer:
    """Serves all workers of this gateway.

    Args:
        in_flight: Counts the workers' requests among those in flight.
        directory: The stored keys, tenants and limits.
        refresher: Keeps the directory of this process up to date.
        make_snapshot: Makes the snapshot of what a worker has to know now.
        clock: The time, for request timelines.
        answers: The cache of answers of the workers, where they do not share a Redis.
        on_worker_retires: Called with the process id of a worker that is replaced.
    """

    def __init__(
        self,
        in_flight: InFlightLimiter,
        directory: DirectorySource,
        refresher: DirectoryRefresher,
        make_snapshot: Callable[[], ControllerSnapshot],
        clock: Clock,
        answers: AnswerBackend,
        *,
        on_worker_retires: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.answers = answers
        self.answer_peers = ControllerPeers()
        self.on_worker_retires = on_worker_retires
        self.in_flight = in_flight
        self.directory = directory
        self.refresher = refresher
        self.observers: Sequence[RequestObserver] = ()
        self._flow_controller: LocalFlowController | None = None
        self.make_snapshot = make_snapshot
        self.clock = clock
        self.sessions: set[WorkerSession] = set()
        self.surviving_leases: Collection[str] = ()
        """Leases of a dead controller that the ledger has carried over."""
        self._last_snapshot: ControllerSnapshot | None = None

    @property
    def flow_controller(self) -> LocalFlowController:
        """The flow controller of the configuration in force."""
        assert self._flow_controller is not None, "no configuration is in force yet"
        return self._flow_controller

    def reconfigure(self, flow_controller: LocalFlowController, observers: Sequence[RequestObserver]) -> None:
        """Uses the flow controller and the request observers of another configuration."""
        self._flow_controller, self.observers = flow_controller, observers

    @property
    def workers(self) -> list[tuple[int, int]]:
        """The connected workers, as pairs of number and process id."""
        return sorted((session.worker, session.pid) for session in self.sessions if session.pid)

    async def open(self, worker_sessions: WorkerSessions, surviving_leases: Collection[str]) -> None:
        """Serves the workers that wait, and those that connect from now on.

        Grants of a dead controller whose requests go on are granted again before any worker is asked what it wants:
        first those of requests that run, then those of requests that wait, in the order of arrival.

        Args:
            worker_sessions: The sessions of the workers.
            surviving_leases: Leases of a dead controller that the ledger has carried over.
        """
        self.surviving_leases = surviving_leases
        resumptions = sorted(
            ((resume_grant, session) for session in worker_sessions.sessions for resume_grant in session.resume_grants),
            key=lambda resumption: (not resumption[0].replica, resumption[0].admit_request.arrived_s),
        )
        for resume_grant, session in resumptions:
            await session.resume(self, resume_grant)
        if resumptions:
            _log.warning("%d requests of a controller that is dead go on with this one.", len(resumptions))
        worker_sessions.attach_controller(self)

    def send_snapshots(self) -> None:
        """Sends the changed snapshot to every worker."""
        self._last_snapshot = snapshot = self.make_snapshot()
        for session in self.sessions:
            session.send_snapshot(snapshot)

    def send_snapshots_if_changed(self) -> None:
        """Sends the snapshot to every worker if it has changed."""
        if self.sessions and self.make_snapshot() != self._last_snapshot:
            self.send_snapshots()

    async def reload_directory(self) -> None:
        """Reloads keys, tenants and limits; returns once every worker uses them, or after `_DIRECTORY_ACK_TIMEOUT_S`.

        Raises:
            StoreUnavailable: The store cannot be read.
        """
        await self.refresher.load()
        self.send_snapshots()
        version = self.make_snapshot().directory_version
        acks = [asyncio.ensure_future(session.wait_directory_version(version)) for session in self.sessions]
        if acks:
            await asyncio.wait(acks, timeout=_DIRECTORY_ACK_TIMEOUT_S)
        for ack in acks:
            ack.cancel()

    async def close(self) -> None:
        """Closes every worker connection and waits for its tasks."""
        for session in list(self.sessions):
            session.connection.close()
        await asyncio.gather(*(task for session in self.sessions for task in session.tasks), return_exceptions=True)


_WORKER_CONNECT_TIMEOUT_S = 5.0
"""How long a live worker may take to connect; a worker tries twenty times a second."""
_LIVENESS_INTERVAL_S = 0.1
"""How often it is checked whether one of the workers has died meanwhile."""


@asynccontextmanager
async def accept_workers(path: Path) -> AsyncIterator[WorkerSessions]:
    """Accepts worker connections at a Unix socket for as long as the block lasts."""
    worker_sessions = WorkerSessions()
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: WorkerSession(worker_sessions).connection, str(path))
    try:
        yield worker_sessions
    finally:
        server.close()


def _key_of(message: AnswerQuery | AnswerStored) -> AnswerKey:
    """Returns the key of the answer that a message is about."""
    return AnswerKey(
        message.digest,
        tenant=message.tenant,
        organisation=message.organisation,
        model=message.model,
        server=message.server,
        epoch=message.epoch,
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _PendingReport(msgspec.Struct):
    """The state of a request whose end cannot be reported yet.

    The worker may report the end before all parts of the request have been removed here.
    """

    active_requests: int = 0
    """Number of parts of the request, one for each model that it tried, that still run here."""
    spans: list[TimelineSpan] = []
    """Spans of the parts that have ended."""
    request_ended: RequestEnded | None = None
