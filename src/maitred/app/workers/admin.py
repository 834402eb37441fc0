"""Worker processes as the admin API lists and replaces them."""

from collections.abc import Callable, Collection

import psutil

from maitred.app.workers.controller_server import WorkerSession
from maitred.app.workers.ipc import IpcFolder
from maitred.core.errors import Conflict
from maitred.wire.admin.responses import WorkerBody
from maitred.wire.admin.times import to_iso


class WorkerAdmin:
    """Lists and replaces the worker processes. Implements `maitred.api.admin.service.WorkerService`.

    Args:
        sessions: Returns the session of each connected worker.
        ipc: Finds the supervisor, which replaces workers; None: the gateway is one process.
    """

    def __init__(self, sessions: Callable[[], Collection[WorkerSession]], ipc: IpcFolder | None) -> None:
        self._sessions = sessions
        self._ipc = ipc

    def list_workers(self) -> list[WorkerBody]:
        """Lists the workers by number; a worker that is leaving stands before its successor."""
        started = sorted(self._start_times(), key=lambda entry: (entry[1].worker, entry[0]))
        newest = {session.worker: session for _, session in started}
        return [
            WorkerBody(
                worker=session.worker,
                pid=session.pid,
                started_at=to_iso(started_s),
                leaving=newest[session.worker] is not session,
                requests=session.requests,
            )
            for started_s, session in started
        ]

    def replace_all(self) -> None:
        """Has the supervisor replace all workers by new processes.

        Raises:
            Conflict: The gateway is one process and has no workers.
        """
        if self._ipc is None:
            raise Conflict(
                "This gateway is one process (server.workers is 1), which cannot be replaced while it serves. "
                "SIGTERM lets its answers end and then ends it."
            )
        self._ipc.request_worker_replacement()

    def _start_times(self) -> list[tuple[float, WorkerSession]]:
        started = []
        for session in self._sessions():
            try:
                started.append((psutil.Process(session.pid).create_time(), session))
            except psutil.Error:
                continue  # it has ended since
        return started
