"""Routes of models in memory: models that are loaded on demand, and models that can sleep."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import SleepableModels
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Handler, Route
from maitred.core.tenancy import Scope
from maitred.wire.admin.decode import decode_body
from maitred.wire.admin.requests import NameModel, UnloadModel
from maitred.wire.admin.responses import LoadableBody, LoadableList, SleeperBody, SleeperList

PATH = "/admin/v1/models"


class OnDemandModelRoutes:
    """Routes of models that are loaded on demand, and of models that can sleep.

    Args:
        admin: The parts that admin routes share.
        sleepables: The models that can sleep: those loaded on demand, and those that are always resident.
    """

    def __init__(self, admin: DirectoryAdmin, sleepables: SleepableModels) -> None:
        self._admin = admin
        self._sleepable = sleepables

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route(
                *("GET", PATH, self.list, "Models that are loaded on demand."),
                returns=LoadableList,
                needs=Scope.ADMIN,
            ),
            self._order("load", "Loads a model.", self.load),
            self._order("unload", "Unloads a model once its answers have ended.", self.unload, reads=UnloadModel),
            self._order("pin", "Loads a model, and keeps it.", self.pin),
            self._order("unpin", "Lets a model go when others need its room.", self.unpin),
            Route(
                *("GET", f"{PATH}/sleep", self.list_sleepable, "Models that can sleep, and whether they do."),
                returns=SleeperList,
                needs=Scope.ADMIN,
            ),
            self._order("sleep", "Gives a model's memory back, not its process.", self.sleep, returns=SleeperBody),
            self._order("wake", "Wakes a model ahead of its next request.", self.wake, returns=SleeperBody),
        ]

    def _order(
        self, verb: str, summary: str, handler: Handler, reads: type = NameModel, returns: type = LoadableBody
    ) -> Route:
        return Route("POST", f"{PATH}/{verb}", handler, summary, reads=reads, returns=returns, needs=Scope.ADMIN)

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with all models that are loaded on demand."""
        await self._admin.reply(exchange, self._sleepable.on_demand.all())

    async def load(self, exchange: HttpExchange) -> None:
        """Loads a model; its `state` in the list shows when it is loaded."""
        await self._admin.reply(exchange, self._sleepable.on_demand.load(decode_body(exchange.body, NameModel).model))

    async def unload(self, exchange: HttpExchange) -> None:
        """Unloads a model; its `state` in the list shows when its memory is free."""
        named = decode_body(exchange.body, UnloadModel)
        await self._admin.reply(exchange, self._sleepable.on_demand.unload(named.model, hold=named.hold))

    async def pin(self, exchange: HttpExchange) -> None:
        """Loads a model and keeps it in memory."""
        await self._admin.reply(exchange, self._sleepable.on_demand.pin(decode_body(exchange.body, NameModel).model))

    async def unpin(self, exchange: HttpExchange) -> None:
        """Lets a model be unloaded again when memory is needed."""
        await self._admin.reply(exchange, self._sleepable.on_demand.unpin(decode_body(exchange.body, NameModel).model))

    async def list_sleepable(self, exchange: HttpExchange) -> None:
        """Answers with all models that can sleep."""
        await self._admin.reply(exchange, SleeperList(data=self._sleepable.all()))

    async def sleep(self, exchange: HttpExchange) -> None:
        """Puts a model to sleep; its `state` in the list shows when it sleeps."""
        await self._admin.reply(exchange, self._sleepable.sleep(decode_body(exchange.body, NameModel).model))

    async def wake(self, exchange: HttpExchange) -> None:
        """Wakes a model; its `state` in the list shows when it serves."""
        await self._admin.reply(exchange, self._sleepable.wake(decode_body(exchange.body, NameModel).model))
