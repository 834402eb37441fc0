"""Routes of API keys.

Only the response that created a key shows it in full. All other responses of these routes can be logged.
"""

from msgspec import UNSET

from maitred.api.admin.directory_admin import AdminReply, DirectoryAdmin, page_of
from maitred.api.dialect import error_body
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound
from maitred.core.tenancy import ApiKey, Scope
from maitred.identity.keys import make_key
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_body, decode_query
from maitred.wire.admin.requests import CreateKey, KeysQuery, RotateKey, UpdateKey
from maitred.wire.admin.responses import KeyBody, KeyList
from maitred.wire.openai.faults import format_value

PATH = "/admin/v1/keys"
_ID_LENGTH = 16


class KeyRoutes:
    """Admin routes of API keys.

    Args:
        admin: The parts that admin routes share.
    """

    def __init__(self, admin: DirectoryAdmin) -> None:
        self._admin = admin

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        path_with_id = f"{PATH}/{{id}}"
        needs = Scope.ADMIN
        create, rotate = "A new key, shown this once.", "A new secret for a key, shown this once."
        return [
            Route("GET", PATH, self.list, "API keys.", returns=KeyList, query=KeysQuery, needs=needs),
            Route("POST", PATH, self.create, create, reads=CreateKey, returns=KeyBody, needs=needs, remembers=True),
            Route("GET", path_with_id, self.get, "One API key.", returns=KeyBody, needs=needs),
            Route(
                "PATCH", path_with_id, self.update, "Changes an API key.", reads=UpdateKey, returns=KeyBody, needs=needs
            ),
            Route(
                "POST",
                f"{path_with_id}/rotate",
                self.rotate,
                rotate,
                reads=RotateKey,
                returns=KeyBody,
                needs=needs,
                remembers=True,
            ),
            Route(
                "POST", f"{path_with_id}/revoke", self.revoke, "Ends an API key for good.", returns=KeyBody, needs=needs
            ),
            Route("DELETE", path_with_id, self.revoke, "Ends an API key for good.", returns=KeyBody, needs=needs),
        ]

    async def list(self, exchange: HttpExchange) -> None:
        """Answers with a page of keys."""
        query = decode_query(exchange.query, KeysQuery)
        rules.check_page(query.limit, query.after)
        if query.tenant is not None:
            rules.check_id("tenant", query.tenant)
        found = await self._admin.store.keys(query.tenant, query.after, query.limit + 1)
        keys, has_more = page_of(found, query.limit)
        data = [self._key_body(key) for key in keys]
        answer = KeyList(data=data, has_more=has_more, next=data[-1].id if has_more else None)
        await self._admin.reply(exchange, answer)

    async def create(self, exchange: HttpExchange) -> None:
        """Creates a key, and answers with its secret once."""
        request = decode_body(exchange.body, CreateKey)
        rules.check_id("tenant", request.tenant)
        rules.check_name(request.name)
        if request.id is not None:
            rules.check_key_id("id", request.id)
        new = make_key(request.id or self._admin.id_for(exchange, _ID_LENGTH))
        key = ApiKey(
            id=new.public_id,
            tenant=request.tenant,
            name=request.name,
            scopes=rules.parse_scopes(request.scopes),
            secrets=(new.secret,),
            expires_s=rules.parse_expiry(request.expires_at, self._admin.now_s()),
            cache_controls=rules.parse_cache_controls(request.cache_controls),
        )

        async def make() -> AdminReply:
            await self._admin.store.create_key(key)
            await self._admin.on_change()
            return AdminReply(self._key_body(key, new.plaintext), self._shown_before(key.id, "made the key"))

        await self._admin.once(exchange, make)

    async def get(self, exchange: HttpExchange) -> None:
        """Answers with one key."""
        await self._admin.reply(exchange, self._key_body(await self._admin.store.key(_id_in(exchange))))

    async def update(self, exchange: HttpExchange) -> None:
        """Changes the fields of a key that the body names."""
        key_id = _id_in(exchange)
        request = decode_body(exchange.body, UpdateKey)
        changes: dict[str, object] = {}
        if request.name is not UNSET:
            rules.check_name(request.name)
            changes["name"] = request.name
        if request.scopes is not UNSET:
            changes["scopes"] = rules.parse_scopes(request.scopes)
        if request.expires_at is not UNSET:
            changes["expires_s"] = rules.parse_expiry(request.expires_at, self._admin.now_s())
        if request.cache_controls is not UNSET:
            changes["cache_controls"] = rules.parse_cache_controls(request.cache_controls)
        if not changes:
            raise InvalidRequest("The body changes nothing. Name a field to change.")
        key = await self._admin.store.update_key(key_id, **changes)
        await self._admin.on_change()
        await self._admin.reply(exchange, self._key_body(key))

    async def rotate(self, exchange: HttpExchange) -> None:
        """Makes a new secret for a key; the old secret stays valid for a while."""
        key_id = _id_in(exchange)
        overlap_s = rules.parse_overlap(decode_body(exchange.body, RotateKey))

        async def make() -> AdminReply:
            new = make_key(key_id)
            key = await self._admin.store.rotate_key(key_id, new.secret, overlap_s)
            await self._admin.on_change()
            return AdminReply(
                self._key_body(key, new.plaintext), self._shown_before(key_id, "gave a new secret to the key")
            )

        await self._admin.once(exchange, make)

    async def revoke(self, exchange: HttpExchange) -> None:
        """Revokes a key; revoking it again changes nothing."""
        key = await self._admin.store.revoke_key(_id_in(exchange))
        await self._admin.on_change()
        await self._admin.reply(exchange, self._key_body(key))

    def _key_body(self, key: ApiKey, plaintext: str | None = None) -> KeyBody:
        return KeyBody.of(key, self._admin.now_s(), UNSET if plaintext is None else plaintext)

    def _shown_before(self, key_id: str, did: str) -> tuple[int, bytes]:
        """Returns the reply to a repeat: the key exists, and its secret was not stored."""
        error = Conflict(
            f"This request came before and {did} {key_id}. The key was shown then, and cannot be shown again. If that "
            f"answer was lost, POST {PATH}/{key_id}/rotate gives it a new secret.",
            param="Idempotency-Key",
        )
        return error.http_status, error_body(error)


def _id_in(exchange: HttpExchange) -> str:
    if not rules.is_key_id(exchange.parameter):
        raise ResourceNotFound(
            f"There is no key {format_value(exchange.parameter)}. GET {PATH} lists them.", param="id"
        )
    return exchange.parameter
