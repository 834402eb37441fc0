"""Routes of LiteLLM's `/key/*`."""

import re
from typing import Any

from maitred.api.exchange import HttpExchange
from maitred.api.litellm.accounts import KeyRow, LitellmAccounts
from maitred.api.litellm.dialect import answer, litellm_route
from maitred.api.routes import Route
from maitred.core.errors import Forbidden, InvalidRequest
from maitred.core.tenancy import Scope
from maitred.identity.identity import read_credential
from maitred.wire.admin.decode import decode_query
from maitred.wire.litellm.requests import (
    ChangeKey,
    DeleteKeys,
    GenerateKey,
    KeyQuery,
    ListKeysQuery,
    NameKey,
    RegenerateKey,
    decode_fields,
)

_PATH_KEY = re.compile(r"[A-Za-z0-9_-]{1,512}", re.ASCII)


class LitellmKeyRoutes:
    """Routes of LiteLLM's keys.

    Args:
        accounts: Keys, teams, users and budgets.
    """

    def __init__(self, accounts: LitellmAccounts) -> None:
        self._accounts = accounts

    def routes(self) -> list[Route]:
        """Returns the routes in the order of their paths."""
        return [
            litellm_route("POST", "/key/generate", self.generate, reads=GenerateKey),
            litellm_route("GET", "/key/info", self.info, query=KeyQuery, needs=Scope.INFERENCE),
            litellm_route("POST", "/key/update", self.update, reads=ChangeKey),
            litellm_route("POST", "/key/delete", self.delete, reads=DeleteKeys),
            litellm_route("GET", "/key/list", self.list, query=ListKeysQuery),
            litellm_route("POST", "/key/regenerate", self.regenerate, reads=RegenerateKey),
            litellm_route("POST", "/key/{key}/regenerate", self.regenerate, reads=RegenerateKey),
            litellm_route("POST", "/key/block", self.block, reads=NameKey),
            litellm_route("POST", "/key/unblock", self.unblock, reads=NameKey),
        ]

    async def generate(self, exchange: HttpExchange) -> None:
        """Makes a key, and shows it this once."""
        request, noted = decode_fields(exchange.body, GenerateKey)
        if request.team_id is not None and request.user_id is not None:
            noted.append("user_id")
        text, row = await self._accounts.generate(request)
        await answer(exchange, await self._body_with_text(text, row), noted)

    async def info(self, exchange: HttpExchange) -> None:
        """Shows a key; who is no administrator sees only the own one."""
        query = decode_query(exchange.query, KeyQuery)
        own = read_credential(exchange.header) or ""
        if Scope.ADMIN in exchange.principal.scopes:
            row = await self._accounts.find(own if query.key is None else query.key)
        else:
            row = await self._accounts.find(own)
            if query.key not in (None, own, row.token, row.key.id):
                raise Forbidden("This key may only ask about itself. Use the master key, or one of the scope admin.")
        shown = row.token if query.key is None else query.key
        await answer(exchange, {"key": shown, "info": await self._accounts.info(row)})

    async def update(self, exchange: HttpExchange) -> None:
        """Changes the fields of a key that the body names."""
        request, noted = decode_fields(exchange.body, ChangeKey)
        row = await self._accounts.update(await self._find(request.key), request)
        await answer(exchange, {"key": request.key, "token": row.token, **await self._accounts.info(row)}, noted)

    async def delete(self, exchange: HttpExchange) -> None:
        """Ends keys for good, by their texts, their SHA-256 or their aliases."""
        request, noted = decode_fields(exchange.body, DeleteKeys)
        if not request.keys and not request.key_aliases:
            raise InvalidRequest("keys or key_aliases must name at least one key.", param="keys")
        rows = [await self._accounts.find(named) for named in request.keys]
        if request.key_aliases:
            aliases = set(request.key_aliases)
            rows += [row async for row in self._accounts.live_keys() if row.key.name in aliases]
        for row in rows:
            await self._accounts.delete(row)
        await answer(exchange, {"deleted_keys": request.keys or request.key_aliases}, noted)

    async def list(self, exchange: HttpExchange) -> None:
        """Lists keys by their SHA-256, or as a whole."""
        query = decode_query(exchange.query, ListKeysQuery)
        rows = [row async for row in self._accounts.live_keys() if _fits(row, query)]
        page = rows[(query.page - 1) * query.size : query.page * query.size]
        keys: list[Any] = [row.token for row in page]
        if query.return_full_object:
            sums = await self._accounts.spent_by_tenant()
            keys = [{"token": row.token, **await self._accounts.info(row, sums)} for row in page]
        total = {"total_count": len(rows), "current_page": query.page, "total_pages": -(-len(rows) // query.size)}
        await answer(exchange, {"keys": keys, **total})

    async def regenerate(self, exchange: HttpExchange) -> None:
        """Gives a key a new text, and shows it this once."""
        request, noted = decode_fields(exchange.body, RegenerateKey)
        named = exchange.parameter or request.key
        if exchange.parameter and not _PATH_KEY.fullmatch(exchange.parameter):
            raise InvalidRequest("The path names no key. Send it as `key` in the body.", param="key")
        grace_s = 0.0
        if request.grace_period:
            grace_s = self._accounts.duration_s("grace_period", request.grace_period)
        row = await self._find(named)
        text, row = await self._accounts.regenerate(row, request.new_key, grace_s)
        row = await self._accounts.update(row, request)
        await answer(exchange, await self._body_with_text(text, row), noted)

    async def block(self, exchange: HttpExchange) -> None:
        """Refuses a key until it is unblocked."""
        await self._set_blocked(exchange, blocked=True)

    async def unblock(self, exchange: HttpExchange) -> None:
        """Accepts a blocked key again."""
        await self._set_blocked(exchange, blocked=False)

    async def _set_blocked(self, exchange: HttpExchange, *, blocked: bool) -> None:
        request, noted = decode_fields(exchange.body, NameKey)
        row = await self._accounts.update(await self._find(request.key), ChangeKey(blocked=blocked))
        await answer(exchange, {"token": row.token, **await self._accounts.info(row)}, noted)

    async def _find(self, named: str | None) -> KeyRow:
        if not named:
            raise InvalidRequest("key must name a key: its text, or its SHA-256 as `token`.", param="key")
        return await self._accounts.find(named)

    async def _body_with_text(self, text: str, row: KeyRow) -> dict[str, Any]:
        """Returns the answer with a key's text."""
        info = await self._accounts.info(row)
        return {**info, "key": text, "key_name": f"sk-...{text[-4:]}", "token": row.token, "token_id": row.token}


def _fits(row: KeyRow, query: ListKeysQuery) -> bool:
    wanted = (query.user_id, query.team_id, query.key_alias, query.key_hash)
    has = (row.user_id, row.team_id, row.key.name, row.token)
    return all(each is None or each == own for each, own in zip(wanted, has, strict=True))
