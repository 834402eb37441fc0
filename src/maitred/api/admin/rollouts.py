"""Routes of rollouts: the state of new model versions, and their share of requests."""

from collections.abc import Awaitable, Callable

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import RolloutService
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Handler, Route
from maitred.core.tenancy import Scope
from maitred.wire.admin.decode import decode_body
from maitred.wire.admin.requests import NameRollout, StartRollout, WeighRollout
from maitred.wire.admin.responses import RolloutBody, RolloutList

PATH = "/admin/v1/rollouts"


class RolloutRoutes:
    """Admin routes of rollouts.

    Args:
        admin: The parts that admin routes share.
        rollouts: The rollouts of this installation.
    """

    def __init__(self, admin: DirectoryAdmin, rollouts: RolloutService) -> None:
        self._admin = admin
        self._rollouts = rollouts

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route("GET", PATH, self.list, "Rollouts, and how they stand.", returns=RolloutList, needs=Scope.ADMIN),
            self._order("start", "Begins a rollout, or begins one again.", self.start, StartRollout),
            self._order("weight", "Gives the canary another share.", self.weigh, WeighRollout),
            self._order("switch", "Gives the canary everybody.", self.switch),
            self._order("promote", "Gives the canary everybody, for good.", self.promote),
            self._order("rollback", "Gives the stable version everybody.", self.rollback),
            self._order("end", "Takes a rollout away.", self.end),
        ]

    def _order(self, verb: str, summary: str, handler: Handler, reads: type = NameRollout) -> Route:
        return Route("POST", f"{PATH}/{verb}", handler, summary, reads=reads, returns=RolloutBody, needs=Scope.ADMIN)

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with all rollouts."""
        await self._admin.reply(exchange, RolloutList(data=[*self._rollouts.all()]))

    async def start(self, exchange: HttpExchange) -> None:
        """Starts a rollout, or starts it again from the beginning."""
        await self._admin.reply(exchange, await self._rollouts.start(decode_body(exchange.body, StartRollout)))

    async def weigh(self, exchange: HttpExchange) -> None:
        """Sets the share of requests that the canary gets."""
        request = decode_body(exchange.body, WeighRollout)
        await self._admin.reply(exchange, await self._rollouts.weigh(request.name, request))

    async def switch(self, exchange: HttpExchange) -> None:
        """Sends all requests to the canary; the stable version stays ready."""
        await self._do(exchange, self._rollouts.switch)

    async def promote(self, exchange: HttpExchange) -> None:
        """Sends all requests to the canary for good."""
        await self._do(exchange, self._rollouts.promote)

    async def rollback(self, exchange: HttpExchange) -> None:
        """Sends all requests to the stable version. Requests that run at the canary end there."""
        await self._do(exchange, self._rollouts.rollback)

    async def end(self, exchange: HttpExchange) -> None:
        """Ends a rollout: the name leads where it leads without a rollout."""
        await self._do(exchange, self._rollouts.end)

    async def _do(self, exchange: HttpExchange, order: Callable[[str], Awaitable[RolloutBody]]) -> None:
        await self._admin.reply(exchange, await order(decode_body(exchange.body, NameRollout).name))
