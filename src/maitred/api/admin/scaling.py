"""Routes of scaling: how many replicas models have and why, and numbers that operators set for a time."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import ReplicaService
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.tenancy import Scope
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_body, decode_query
from maitred.wire.admin.scaling import (
    EndScalingOverride,
    ScalingBody,
    ScalingDecisionList,
    ScalingHistoryQuery,
    ScalingList,
    SetScalingOverride,
)

PATH = "/admin/v1/scaling"


class ScalingRoutes:
    """Admin routes of scaling.

    Args:
        admin: The parts that admin routes share.
        replicas: The replicas of this gateway, with its scaled models.
    """

    def __init__(self, admin: DirectoryAdmin, replicas: ReplicaService) -> None:
        self._admin = admin
        self._replicas = replicas

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route(
                *("GET", PATH, self.list, "Models whose number of replicas follows the demand."),
                returns=ScalingList,
                needs=Scope.ADMIN,
            ),
            Route(
                *("GET", f"{PATH}/decisions", self.decisions, "Decisions on a model's replicas, the newest first."),
                returns=ScalingDecisionList,
                query=ScalingHistoryQuery,
                needs=Scope.ADMIN,
            ),
            Route(
                *("POST", f"{PATH}/override", self.set_override, "Sets the number of a model's replicas for a time."),
                reads=SetScalingOverride,
                returns=ScalingBody,
                needs=Scope.ADMIN,
            ),
            Route(
                *(
                    "DELETE",
                    f"{PATH}/override",
                    self.end_override,
                    "Has the demand decide on a model's replicas again.",
                ),
                returns=ScalingBody,
                query=EndScalingOverride,
                needs=Scope.ADMIN,
            ),
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with all scaled models."""
        await self._admin.reply(exchange, ScalingList(data=[*self._replicas.scaling.all()]))

    async def decisions(self, exchange: HttpExchange) -> None:
        """Answers with a page of decisions of one model."""
        query = decode_query(exchange.query, ScalingHistoryQuery)
        rules.check_page(query.limit, query.after)
        rules.check_number_cursor(query.after)
        await self._admin.reply(exchange, await self._replicas.scaling.decisions(query))

    async def set_override(self, exchange: HttpExchange) -> None:
        """Sets the number of a model's replicas, until a time has passed."""
        wish = decode_body(exchange.body, SetScalingOverride)
        await self._admin.reply(exchange, await self._replicas.scaling.set_override(wish))

    async def end_override(self, exchange: HttpExchange) -> None:
        """Ends an override before its time."""
        query = decode_query(exchange.query, EndScalingOverride)
        await self._admin.reply(exchange, await self._replicas.scaling.end_override(query.model))
