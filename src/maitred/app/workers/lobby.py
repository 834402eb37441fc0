"""Where workers wait until the controller can serve them, with what they have to tell it first."""

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.app.workers.session import WorkerSession
from maitred.store.orphan_journal import SurvivingWork

if TYPE_CHECKING:
    from maitred.app.workers.controller import ControllerServer

_PATIENCE_S = 5.0
"""For a worker that lives and does not come; it tries twenty times a second."""
_LOOK_S = 0.1
"""How soon it is noticed that one of them has died meanwhile."""


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
