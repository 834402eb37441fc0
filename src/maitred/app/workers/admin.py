"""The workers as operators see them."""

from collections.abc import Callable, Collection

import psutil

from maitred.app.workers.controller import WorkerSession
from maitred.app.workers.ipc import IpcDirectory
from maitred.core.errors import Conflict
from maitred.wire.admin.responses import WorkerBody
from maitred.wire.admin.times import iso_of


class WorkerAdmin:
    """All of them. Implements `maitred.api.admin.workers.WorkerService`.

    Args:
        clerks: One for each that is connected.
        house: Where the supervisor is, who replaces them; None: the gateway is one process.
    """

    def __init__(self, clerks: Callable[[], Collection[WorkerSession]], house: IpcDirectory | None) -> None:
        self._clerks = clerks
        self._house = house

    def all(self) -> list[WorkerBody]:
        """By their numbers; who leaves stands before its successor."""
        born = sorted(self._born(), key=lambda each: (each[1].worker, each[0]))
        newest = {clerk.worker: clerk for _, clerk in born}
        return [
            WorkerBody(
                worker=clerk.worker,
                pid=clerk.pid,
                started_at=iso_of(started_s),
                leaving=newest[clerk.worker] is not clerk,
                requests=clerk.requests,
            )
            for started_s, clerk in born
        ]

    def restart(self) -> None:
        """Has them replaced by new ones.

        Raises:
            Conflict: There are none.
        """
        if self._house is None:
            raise Conflict(
                "This gateway is one process (server.workers is 1), which cannot be replaced while it serves. "
                "SIGTERM lets its answers end and then ends it."
            )
        self._house.replace()

    def _born(self) -> list[tuple[float, WorkerSession]]:
        born = []
        for clerk in self._clerks():
            try:
                born.append((psutil.Process(clerk.pid).create_time(), clerk))
            except psutil.Error:
                continue  # it has ended since
        return born
