"""Routes of the cache of answers: what it keeps, and how operators remove answers."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import CacheService
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import InvalidRequest
from maitred.core.tenancy import Scope
from maitred.wire.admin.cache import CacheBody, RemovedAnswers, SelectAnswers
from maitred.wire.admin.decode import decode_query

PATH = "/admin/v1/cache"


class CacheRoutes:
    """Admin routes of the cache of answers.

    Args:
        admin: The parts that admin routes share.
        cache: The cache of this gateway.
    """

    def __init__(self, admin: DirectoryAdmin, cache: CacheService) -> None:
        self._admin = admin
        self._cache = cache

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route("GET", PATH, self.show, "What the cache of answers keeps.", returns=CacheBody, needs=Scope.ADMIN),
            Route(
                *("DELETE", PATH, self.remove, "Removes answers from the cache."),
                returns=RemovedAnswers,
                query=SelectAnswers,
                needs=Scope.ADMIN,
            ),
        ]

    async def show(self, exchange: HttpExchange) -> None:
        """Answers with the state of the cache and its content by tenant, model and epoch."""
        await self._admin.reply(exchange, await self._cache.describe())

    async def remove(self, exchange: HttpExchange) -> None:
        """Removes the selected answers, and answers with their number."""
        selection = decode_query(exchange.query, SelectAnswers)
        is_selective = any((selection.tenant, selection.model, selection.key)) or selection.epoch is not None
        if not is_selective and not selection.all:
            raise InvalidRequest(
                "Which answers are to be removed? Name a tenant, a model, a key or an epoch; or pass all=true to "
                "remove them all."
            )
        if is_selective and selection.all:
            raise InvalidRequest(
                "all=true removes all answers, so it stands alone. Leave it out, or tenant, model, key and epoch.",
                param="all",
            )
        await self._admin.reply(exchange, RemovedAnswers(removed=await self._cache.remove(selection)))
