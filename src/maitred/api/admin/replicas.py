"""Routes of replicas: their state, and commands that stop or start their traffic."""

from collections.abc import Callable

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import ReplicaService
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Handler, Route
from maitred.core.tenancy import Scope
from maitred.wire.admin.decode import decode_body
from maitred.wire.admin.requests import NameReplica, ScaleModel
from maitred.wire.admin.responses import AgentList, PoolBody, PoolList, ReplicaBody, ReplicaList

PATH = "/admin/v1/replicas"


class ReplicaRoutes:
    """Admin routes of replicas.

    Args:
        admin: The parts that admin routes share.
        replicas: The replicas of this gateway.
    """

    def __init__(self, admin: DirectoryAdmin, replicas: ReplicaService) -> None:
        self._admin = admin
        self._replicas = replicas

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route("GET", PATH, self.list, "Replicas of all models.", returns=ReplicaList, needs=Scope.ADMIN),
            Route(
                "GET",
                f"{PATH}/pools",
                self.pools,
                "Models whose replicas come and go.",
                returns=PoolList,
                needs=Scope.ADMIN,
            ),
            Route(
                "GET",
                f"{PATH}/agents",
                self.agents,
                "Agents that own engines on other machines.",
                returns=AgentList,
                needs=Scope.ADMIN,
            ),
            Route(
                "POST",
                f"{PATH}/scale",
                self.scale,
                "Sets how many replicas of a model serve and sleep.",
                reads=ScaleModel,
                returns=PoolBody,
                needs=Scope.ADMIN,
            ),
            self._order("drain", "Takes a replica out of service once what runs there has ended.", self.drain),
            self._order("maintenance", "Takes a replica out of service at once.", self.maintain),
            self._order("resume", "Puts a replica back into service.", self.resume),
        ]

    def _order(self, verb: str, summary: str, handler: Handler) -> Route:
        return Route(
            "POST", f"{PATH}/{verb}", handler, summary, reads=NameReplica, returns=ReplicaBody, needs=Scope.ADMIN
        )

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with all replicas."""
        await self._admin.reply(exchange, ReplicaList(data=[*self._replicas.all()]))

    async def pools(self, exchange: HttpExchange) -> None:
        """Answers with all pools."""
        await self._admin.reply(exchange, PoolList(data=[*self._replicas.pools()]))

    async def agents(self, exchange: HttpExchange) -> None:
        """Answers with all agents."""
        await self._admin.reply(exchange, AgentList(data=[*self._replicas.agents()]))

    async def scale(self, exchange: HttpExchange) -> None:
        """Sets how many replicas of a model serve, and how many sleep."""
        wanted = decode_body(exchange.body, ScaleModel)
        await self._replicas.claim(wanted.model)
        await self._admin.reply(exchange, self._replicas.scale(wanted.model, wanted.serving, wanted.asleep))

    async def drain(self, exchange: HttpExchange) -> None:
        """Stops new requests to a replica; `requests` in the list shows when its requests have ended."""
        await self._do(exchange, self._replicas.drain)

    async def maintain(self, exchange: HttpExchange) -> None:
        """Takes a replica out of service for maintenance."""
        await self._do(exchange, self._replicas.maintain)

    async def resume(self, exchange: HttpExchange) -> None:
        """Puts a replica back into service."""
        await self._do(exchange, self._replicas.resume)

    async def _do(self, exchange: HttpExchange, order: Callable[[str, str | None], ReplicaBody]) -> None:
        named = decode_body(exchange.body, NameReplica)
        await self._admin.reply(exchange, order(named.replica, named.model))
