"""Routes of the cache of answers: what it keeps, what its scopes of similar questions have learnt, and removals."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import CacheService
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import InvalidRequest
from maitred.core.tenancy import Scope
from maitred.wire.admin import rules
from maitred.wire.admin.cache import CacheBody, RemovedAnswers, SelectAnswers
from maitred.wire.admin.decode import decode_body, decode_query
from maitred.wire.admin.semantic import (
    LabelledPairList,
    LabelledPairsQuery,
    ResetSemanticScopes,
    SelectSemanticScopes,
    SemanticScopeChange,
    SemanticScopeList,
    SemanticScopesQuery,
)

PATH = "/admin/v1/cache"
SEMANTIC_PATH = f"{PATH}/semantic"


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
            Route(
                *("GET", SEMANTIC_PATH, self.scopes, "Scopes of similar questions, and how they stand."),
                returns=SemanticScopeList,
                query=SemanticScopesQuery,
                needs=Scope.ADMIN,
            ),
            Route(
                *("GET", f"{SEMANTIC_PATH}/labels", self.labels, "Compared questions, the newest first."),
                returns=LabelledPairList,
                query=LabelledPairsQuery,
                needs=Scope.ADMIN,
            ),
            Route(
                *("POST", f"{SEMANTIC_PATH}/reset", self.reset_scopes, "Lets scopes of similar questions begin anew."),
                reads=ResetSemanticScopes,
                returns=SemanticScopeChange,
                needs=Scope.ADMIN,
            ),
            Route(
                *("DELETE", SEMANTIC_PATH, self.remove_scopes, "Removes scopes with all that they have learnt."),
                returns=SemanticScopeChange,
                query=SelectSemanticScopes,
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
        _check_selection("answers", "a tenant, a model, a key or an epoch", is_selective, selection.all)
        await self._admin.reply(exchange, RemovedAnswers(removed=await self._cache.remove(selection)))

    async def scopes(self, exchange: HttpExchange) -> None:
        """Answers with a page of scopes of similar questions."""
        query = decode_query(exchange.query, SemanticScopesQuery)
        rules.check_page(query.limit, query.after)
        await self._admin.reply(exchange, await self._cache.scopes(query))

    async def labels(self, exchange: HttpExchange) -> None:
        """Answers with a page of compared questions."""
        query = decode_query(exchange.query, LabelledPairsQuery)
        rules.check_page(query.limit, query.after)
        rules.check_number_cursor(query.after)
        await self._admin.reply(exchange, await self._cache.labels(query))

    async def reset_scopes(self, exchange: HttpExchange) -> None:
        """Lets the selected scopes begin anew, and answers with their number."""
        selection = decode_body(exchange.body, ResetSemanticScopes)
        _check_scopes(selection)
        await self._admin.reply(exchange, SemanticScopeChange(changed=await self._cache.reset_scopes(selection)))

    async def remove_scopes(self, exchange: HttpExchange) -> None:
        """Removes the selected scopes, and answers with their number."""
        selection = decode_query(exchange.query, SelectSemanticScopes)
        _check_scopes(selection)
        await self._admin.reply(exchange, SemanticScopeChange(changed=await self._cache.remove_scopes(selection)))


def _check_selection(what: str, names: str, is_selective: bool, is_all: bool) -> None:
    """Raises InvalidRequest unless it is clear what is selected: something that is named, or all."""
    if not is_selective and not is_all:
        raise InvalidRequest(f"Which {what} are meant? Name {names}; or pass all=true for all of them.")
    if is_selective and is_all:
        raise InvalidRequest(
            f"all=true means all {what}, so it stands alone. Leave it out, or what else is named.", param="all"
        )


def _check_scopes(selection: SelectSemanticScopes | ResetSemanticScopes) -> None:
    is_selective = any((selection.tenant, selection.model, selection.scope, selection.encoder))
    _check_selection("scopes", "a tenant, a model, a scope or an encoder", is_selective, selection.all)
