"""Routes of pinned prefixes: which prefixes stay in the KV caches, and for how long."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import PinService
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.tenancy import Scope
from maitred.wire.admin.decode import decode_body
from maitred.wire.admin.requests import PinPrefix
from maitred.wire.admin.responses import Deleted, PinBody, PinList

PATH = "/admin/v1/pins"


class PinRoutes:
    """Admin routes of pinned prefixes.

    Args:
        admin: The parts that admin routes share.
        pins: The pins of this gateway.
    """

    def __init__(self, admin: DirectoryAdmin, pins: PinService) -> None:
        self._admin = admin
        self._pins = pins

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route("GET", PATH, self.list, "Prefixes that are pinned.", returns=PinList, needs=Scope.ADMIN),
            Route(
                *("POST", PATH, self.pin, "Computes a prefix and keeps it in the KV caches of a model."),
                reads=PinPrefix,
                returns=PinBody,
                needs=Scope.ADMIN,
            ),
            Route(
                *("DELETE", f"{PATH}/{{id}}", self.unpin, "Lets a pinned prefix go."),
                returns=Deleted,
                needs=Scope.ADMIN,
            ),
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with all pinned prefixes."""
        await self._admin.reply(exchange, PinList(data=[*self._pins.all()]))

    async def pin(self, exchange: HttpExchange) -> None:
        """Pins a prefix, and answers when it has been computed."""
        wish = decode_body(exchange.body, PinPrefix)
        await self._admin.reply(exchange, await self._pins.pin(wish, exchange.principal.tenants[-1]))

    async def unpin(self, exchange: HttpExchange) -> None:
        """Removes a pin at once."""
        self._pins.unpin(exchange.parameter)
        await self._admin.reply(exchange, Deleted(id=exchange.parameter, object="pin"))
