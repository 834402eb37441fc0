"""Routes of conversations of the Responses API: lists of items that responses read and add to."""

from functools import partial

from maitred.api.exchange import HttpExchange
from maitred.api.responses.items import list_of, page_of, read_includes, with_ids, written_items
from maitred.api.routes import Route
from maitred.core.errors import ResourceNotFound, Unsupported
from maitred.core.ids import new_object_id
from maitred.core.stored_response import StoredConversation, StoredItem
from maitred.core.tenancy import Scope
from maitred.store.conversations import ConversationStore
from maitred.wire.responses.decode import decode_conversation
from maitred.wire.responses.fields import ignored_includes
from maitred.wire.responses.inbound import check_items
from maitred.wire.responses.requests import AddItems, CreateConversation, ItemsQuery, UpdateConversation
from maitred.wire.responses.resource import ConversationDeleted, ConversationResource, ItemList, decode_item, encode


class ConversationRoutes:
    """Routes that create, read, change and delete conversations and their items.

    Args:
        store: Stores the conversations.
        strict: Whether unknown fields are refused.
    """

    def __init__(self, store: ConversationStore, *, strict: bool) -> None:
        self._store = store
        self._strict = strict

    def routes(self) -> list[Route]:
        """Returns the routes of conversations and of their items."""
        one, item = "/v1/conversations/{id}", "/v1/conversations/{id}/items/{item}"
        route = partial(Route, needs=Scope.INFERENCE)
        return [
            route(
                *("POST", "/v1/conversations", self.create, "Begin a conversation."),
                reads=CreateConversation,
                returns=ConversationResource,
            ),
            route("GET", one, self.show, "A conversation, without its items.", returns=ConversationResource),
            route(
                *("POST", one, self.update, "Replace the metadata of a conversation."),
                reads=UpdateConversation,
                returns=ConversationResource,
            ),
            route("DELETE", one, self.delete, "Delete a conversation with its items.", returns=ConversationDeleted),
            route(
                *("POST", f"{one}/items", self.add_items, "Add items to a conversation."),
                reads=AddItems,
                returns=ItemList,
            ),
            route(
                *("GET", f"{one}/items", self.list_items, "The items of a conversation."),
                returns=ItemList,
                query=ItemsQuery,
            ),
            route("GET", item, self.show_item, "One item of a conversation."),
            route("DELETE", item, self.delete_item, "Delete an item of a conversation.", returns=ConversationResource),
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Stores a new conversation with its first items."""
        request = await exchange.decode(decode_conversation, kind=CreateConversation, strict=self._strict)
        if not self._store.is_enabled:
            raise Unsupported("This server keeps no conversations. Send all items in the input of each request.")
        check_items(request.items or ())
        created_s, expires_s = self._store.lifetime()
        conversation = StoredConversation(
            id=new_object_id("conv").replace("-", "_"),
            tenant=exchange.principal.tenants[0],
            organisation=exchange.principal.tenants[-1],
            created_s=created_s,
            expires_s=expires_s,
            metadata=request.metadata or {},
        )
        await self._store.create(conversation, _to_stored(with_ids(written_items(request.items or ()), _new_suffix())))
        await exchange.respond(encode(_resource(conversation)))

    async def show(self, exchange: HttpExchange) -> None:
        """Returns a stored conversation, without its items."""
        await exchange.respond(encode(_resource(await self._find(exchange, exchange.parameter))))

    async def update(self, exchange: HttpExchange) -> None:
        """Replaces the metadata of a conversation."""
        request = await exchange.decode(decode_conversation, kind=UpdateConversation, strict=self._strict)
        if not await self._store.set_metadata(exchange.principal, exchange.parameter, request.metadata or {}):
            raise _not_found(exchange.parameter)
        await self.show(exchange)

    async def delete(self, exchange: HttpExchange) -> None:
        """Deletes a conversation with its items."""
        if not await self._store.delete(exchange.principal, exchange.parameter):
            raise _not_found(exchange.parameter)
        await exchange.respond(encode(ConversationDeleted(id=exchange.parameter)))

    async def add_items(self, exchange: HttpExchange) -> None:
        """Adds items to a conversation and returns them."""
        request = await exchange.decode(decode_conversation, kind=AddItems, strict=self._strict)
        check_items(request.items)
        exchange.context.ignored_fields = ignored_includes([*(request.include or ()), *read_includes(exchange.query)])
        items = with_ids(written_items(request.items), _new_suffix())
        if not await self._store.add(exchange.principal, exchange.parameter, _to_stored(items)):
            raise _not_found(exchange.parameter)
        await exchange.respond(encode(list_of(items, len(items))))

    async def list_items(self, exchange: HttpExchange) -> None:
        """Returns a page of the items of a conversation."""
        exchange.context.ignored_fields = ignored_includes(read_includes(exchange.query))
        await self._find(exchange, exchange.parameter)
        items = [decode_item(stored.item) for stored in await self._store.items(exchange.parameter)]
        await exchange.respond(encode(page_of(items, dict(exchange.query))))

    async def show_item(self, exchange: HttpExchange) -> None:
        """Returns one item of a conversation."""
        exchange.context.ignored_fields = ignored_includes(read_includes(exchange.query))
        conversation_id, _, item_id = exchange.parameter.partition("/")
        await self._find(exchange, conversation_id)
        for stored in await self._store.items(conversation_id):
            if stored.id == item_id:
                await exchange.respond(stored.item)
                return
        raise _no_item(item_id)

    async def delete_item(self, exchange: HttpExchange) -> None:
        """Deletes one item of a conversation, and returns the conversation."""
        conversation_id, _, item_id = exchange.parameter.partition("/")
        conversation = await self._find(exchange, conversation_id)
        if not await self._store.delete_item(conversation_id, item_id):
            raise _no_item(item_id)
        await exchange.respond(encode(_resource(conversation)))

    async def _find(self, exchange: HttpExchange, conversation_id: str) -> StoredConversation:
        found = await self._store.find(exchange.principal, conversation_id)
        if found is None:
            raise _not_found(conversation_id)
        return found


def _new_suffix() -> str:
    """Returns the end of the ids of items that come together."""
    return new_object_id("").removeprefix("-") + "_in"


def _to_stored(items: list[dict[str, object]]) -> list[StoredItem]:
    return [StoredItem(str(item["id"]), encode(item)) for item in items]


def _resource(conversation: StoredConversation) -> ConversationResource:
    return ConversationResource(
        id=conversation.id, created_at=int(conversation.created_s), metadata=conversation.metadata
    )


def _not_found(conversation_id: str) -> ResourceNotFound:
    return ResourceNotFound(
        f"Conversation with id '{conversation_id[:64]}' not found. It was never made, it was deleted, or its time is "
        "over.",
        param="id",
    )


def _no_item(item_id: str) -> ResourceNotFound:
    return ResourceNotFound(f"The conversation has no item with id '{item_id[:64]}'.", param="item")
