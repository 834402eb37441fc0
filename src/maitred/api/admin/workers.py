"""Routes of API workers: which there are, and to replace them by new ones."""

from collections.abc import Sequence
from typing import Protocol

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.tenancy import Scope
from maitred.wire.admin.responses import WorkerBody, WorkerList

PATH = "/admin/v1/workers"


class WorkerService(Protocol):
    """Service that lists and restarts the workers of this gateway."""

    def all(self) -> Sequence[WorkerBody]:
        """Lists the workers, as they are now; none where the gateway is one process."""
        ...

    def restart(self) -> None:
        """Has them replaced, one after the other; raises Conflict where there are none. Returns before it is done."""
        ...


class WorkerRoutes:
    """Admin routes of workers.

    Args:
        admin: What the routes share.
        workers: Those of this gateway.
    """

    def __init__(self, admin: DirectoryAdmin, workers: WorkerService) -> None:
        self._admin = admin
        self._workers = workers

    def routes(self) -> list[Route]:
        """The routes, in the order of the documentation."""
        return [
            Route("GET", PATH, self.list, "The API workers.", returns=WorkerList, needs=Scope.ADMIN),
            Route(
                "POST",
                f"{PATH}/restart",
                self.restart,
                "Replaces all API workers, one after the other, without dropping a stream.",
                returns=WorkerList,
                needs=Scope.ADMIN,
            ),
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with all workers."""
        await self._admin.reply(exchange, WorkerList(data=[*self._workers.all()]))

    async def restart(self, exchange: HttpExchange) -> None:
        """The answer lists those who are to go; it is done when none of them is listed any more."""
        before = self._workers.all()
        self._workers.restart()
        await self._admin.reply(exchange, WorkerList(data=[*before]))
