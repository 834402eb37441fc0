"""Routes of the last requests and their timelines."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import TimelineStore
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.tenancy import Scope
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_query
from maitred.wire.admin.requests import RequestsQuery
from maitred.wire.admin.responses import TimelineBody, TimelineList

PATH = "/admin/v1/requests"


class RequestRoutes:
    """Admin routes of the last requests.

    Args:
        admin: The parts that admin routes share.
        timelines: The timelines of this gateway.
    """

    def __init__(self, admin: DirectoryAdmin, timelines: TimelineStore) -> None:
        self._admin = admin
        self._timelines = timelines

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route(
                *("GET", PATH, self.list, "The last requests of this gateway."),
                returns=TimelineList,
                query=RequestsQuery,
                needs=Scope.ADMIN,
            ),
            Route(
                *("GET", f"{PATH}/{{id}}", self.get, "What happened to one of them, in order."),
                returns=TimelineBody,
                needs=Scope.ADMIN,
            ),
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with the timelines that are kept, or the latest of them."""
        query = decode_query(exchange.query, RequestsQuery)
        if query.limit is not None:
            rules.check_page(query.limit, "")
        await self._admin.reply(exchange, TimelineList(data=[*self._timelines.latest(query.limit)]))

    async def get(self, exchange: HttpExchange) -> None:
        """Answers with the timeline of one request."""
        await self._admin.reply(exchange, self._timelines.get(exchange.parameter))
