"""Routes of API workers: list them, and replace them by new ones."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import WorkerService
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.tenancy import Scope
from maitred.wire.admin.responses import WorkerList

PATH = "/admin/v1/workers"


class WorkerRoutes:
    """Admin routes of workers.

    Args:
        admin: The parts that admin routes share.
        workers: The workers of this gateway.
    """

    def __init__(self, admin: DirectoryAdmin, workers: WorkerService) -> None:
        self._admin = admin
        self._workers = workers

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
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
        await self._admin.reply(exchange, WorkerList(data=[*self._workers.list_workers()]))

    async def restart(self, exchange: HttpExchange) -> None:
        """Restarts the workers; it is complete when the list shows none of those in the answer."""
        before = self._workers.list_workers()
        self._workers.replace_all()
        await self._admin.reply(exchange, WorkerList(data=[*before]))
