"""Routes of limits and budgets."""

from asyncio import Lock
from contextlib import suppress
from secrets import token_hex

from maitred.api.admin.directory_admin import AdminReply, DirectoryAdmin, page_of
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound
from maitred.core.tenancy import Scope, is_id
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_body, decode_query
from maitred.wire.admin.requests import CreateLimit, LimitsQuery
from maitred.wire.admin.responses import Deleted, LimitBody, LimitList
from maitred.wire.openai.faults import format_value

PATH = "/admin/v1/limits"


class LimitRoutes:
    """Admin routes of limits.

    Args:
        admin: The parts that admin routes share.
    """

    def __init__(self, admin: DirectoryAdmin) -> None:
        self._admin = admin
        self._making = Lock()

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        path_with_id = f"{PATH}/{{id}}"
        needs = Scope.ADMIN
        return [
            Route("GET", PATH, self.list, "Limits.", returns=LimitList, query=LimitsQuery, needs=needs),
            Route(
                "POST",
                PATH,
                self.create,
                "A new limit.",
                reads=CreateLimit,
                returns=LimitBody,
                needs=needs,
                remembers=True,
            ),
            Route("GET", path_with_id, self.get, "One limit.", returns=LimitBody, needs=needs),
            Route(
                "PUT",
                path_with_id,
                self.put,
                "A limit as it shall be.",
                reads=CreateLimit,
                returns=LimitBody,
                needs=needs,
            ),
            Route("DELETE", path_with_id, self.delete, "Deletes a limit.", returns=Deleted, needs=needs),
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with a page of limits."""
        query = decode_query(exchange.query, LimitsQuery)
        rules.check_page(query.limit, query.after)
        if query.subject is not None:
            rules.check_subject(query.subject)
        found = await self._admin.store.limits(query.subject, query.after, query.limit + 1)
        limits, has_more = page_of(found, query.limit)
        data = [LimitBody.of(limit) for limit in limits]
        answer = LimitList(data=data, has_more=has_more, next=data[-1].id if has_more else None)
        await self._admin.reply(exchange, answer)

    async def create(self, exchange: HttpExchange) -> None:
        """Creates a limit under the caller's id or a new one."""
        request = decode_body(exchange.body, CreateLimit)
        limit_id = request.id
        if limit_id is None:
            limit_id = f"lim-{self._admin.id_for(exchange, 16) or token_hex(8)}"
        limit = rules.to_limit(request, limit_id)

        async def make() -> AdminReply:
            # A put changes a limit that exists already. If two requests create a limit under the same id, only one
            # succeeds.
            async with self._making:
                if request.id is not None:
                    await self._check_free(request.id)
                await self._admin.store.put_limit(limit)
            await self._admin.on_change()
            return AdminReply(LimitBody.of(limit))

        await self._admin.once(exchange, make)

    async def get(self, exchange: HttpExchange) -> None:
        """Answers with one limit."""
        await self._admin.reply(exchange, LimitBody.of(await self._admin.store.limit(_id_in(exchange))))

    async def put(self, exchange: HttpExchange) -> None:
        """Sets a limit to the value in the body, whether the limit existed or not."""
        limit_id = exchange.parameter
        request = decode_body(exchange.body, CreateLimit)
        if request.id not in (None, limit_id):
            raise InvalidRequest("id must be the one in the path. Remove it from the body.", param="id")
        limit = rules.to_limit(request, limit_id)
        await self._admin.store.put_limit(limit)
        await self._admin.on_change()
        await self._admin.reply(exchange, LimitBody.of(limit))

    async def delete(self, exchange: HttpExchange) -> None:
        """Deletes the limit in the path."""
        limit_id = _id_in(exchange)
        await self._admin.store.delete_limit(limit_id)
        await self._admin.on_change()
        await self._admin.reply(exchange, Deleted(id=limit_id, object="limit"))

    async def _check_free(self, limit_id: str) -> None:
        with suppress(ResourceNotFound):
            await self._admin.store.limit(limit_id)
            raise Conflict(f"There is a limit {limit_id} already. PUT it, or choose another id.", param="id")


def _id_in(exchange: HttpExchange) -> str:
    if not is_id(exchange.parameter):
        raise ResourceNotFound(
            f"There is no limit {format_value(exchange.parameter)}. GET {PATH} lists them.", param="id"
        )
    return exchange.parameter
