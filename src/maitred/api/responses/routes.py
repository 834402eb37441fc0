"""Routes of OpenAI's Responses API.

A request is converted into the equivalent chat completion and then takes the same path; only the response has another
format. Unless the client says `store: false`, the response is stored before the client gets its end, so the next
request can name it as `previous_response_id`.
"""

import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from maitred.api.chat import to_inference_request
from maitred.api.exchange import HttpExchange
from maitred.api.fair_thread_pool import FairThreadPool
from maitred.api.headers import apply_request_headers
from maitred.api.large_body import LARGE_BODY_BYTES
from maitred.api.recorded_exchange import RecordedExchange
from maitred.api.responses.background import BackgroundResponse, BackgroundResponses, Read
from maitred.api.responses.compaction import (
    CompactionCodec,
    for_summary,
    open_summary,
    read_summary,
    with_half_the_cost,
)
from maitred.api.responses.conversations import ConversationRoutes
from maitred.api.responses.formatter import ResponsesFormatter
from maitred.api.responses.items import (
    decode_items,
    foreign_ids,
    include_parts,
    page_of,
    read_history,
    read_includes,
    with_ids,
    written_items,
)
from maitred.api.responses.turn import ResponsesTurn
from maitred.api.routes import Route
from maitred.api.streaming import CollectedChoice, send_response
from maitred.core.context import Compaction
from maitred.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    MaitredError,
    PreviousResponseNotFound,
    ReplicaUnavailable,
    ResourceNotFound,
    StoreUnavailable,
    Unsupported,
)
from maitred.core.inference import InferenceRequest, NativeRequest, TextDelta
from maitred.core.service import InferenceService, ResponseStream
from maitred.core.stored_response import StoredResponse
from maitred.core.tenancy import Scope
from maitred.store.responses import ResponseStore
from maitred.wire.cache_control import to_cache_control
from maitred.wire.openai.decode import unsupported_by_engine
from maitred.wire.openai.fields import without_positions
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.openai.sampling import to_tool_rules
from maitred.wire.responses.compaction import CompactedWindow, compact_all, compact_earlier, is_user_message
from maitred.wire.responses.decode import decode_compact, decode_input_tokens, decode_responses
from maitred.wire.responses.fields import ignored_includes
from maitred.wire.responses.inbound import (
    SUMMARY_PLACE,
    conversation_items,
    convert_to_chat,
    custom_tools,
    drop_oldest_turns,
    rename_param,
    summary_chat,
    to_chat,
    unread_items,
    with_functions_only,
)
from maitred.wire.responses.outbound import keep_latest_turns, native_fields
from maitred.wire.responses.requests import (
    CompactionItem,
    CompactRequest,
    InputItem,
    InputTokensRequest,
    ItemReference,
    ItemsQuery,
    ResponsesRequest,
    RetrieveQuery,
    with_input,
)
from maitred.wire.responses.resource import (
    CompactedResponse,
    ConversationName,
    InputTokens,
    ItemList,
    OutputCompaction,
    ResponseDeleted,
    ResponseEvent,
    ResponseResource,
    ResponseUsage,
    decode_item,
    encode,
)

log = logging.getLogger(__name__)

_UNKNOWN_SHARE = 0.75
"""Share of a conversation that stays where nobody says how much of it fits."""
_COMPACT_SHARE = 0.75
"""Part of the model's window beyond which a conversation is compacted where the request names no number."""
_REDACTED = "<redacted>"
_MAX_DIGITS = 15
"""Most digits of the number of an event."""
R = TypeVar("R", ResponsesRequest, InputTokensRequest, CompactRequest)


class ResponsesRoutes:
    """Routes that create, read, cancel and delete responses.

    Args:
        answering: The inference service behind the API.
        store: Stores the responses.
        background: Runs the responses that go on without their clients.
        strict: Whether unknown fields are refused.
        heartbeat_s: Longest time in seconds without an event on a stream.
    """

    def __init__(
        self,
        answering: InferenceService,
        store: ResponseStore,
        background: BackgroundResponses,
        *,
        strict: bool,
        heartbeat_s: float,
    ) -> None:
        self._service = answering
        self._store = store
        self._background = background
        self._strict = strict
        self._heartbeat_s = heartbeat_s
        self._threads = FairThreadPool(1, "stored-items")
        self._compactions = CompactionCodec(store, self._threads)

    def routes(self) -> list[Route]:
        """Returns the routes that create, read, cancel and delete responses."""
        one = "/v1/responses/{id}"
        return [
            Route(
                "POST",
                "/v1/responses",
                self.create,
                "Answer a conversation in the form of OpenAI's Responses API.",
                reads=ResponsesRequest,
                returns=ResponseResource,
                streams=ResponseEvent,
                needs=Scope.INFERENCE,
                idempotent=True,
                least_output=1,
            ),
            Route(
                *("POST", "/v1/responses/input_tokens", self.count, "How many tokens an input is to the model."),
                reads=InputTokensRequest,
                returns=InputTokens,
                needs=Scope.INFERENCE,
            ),
            Route(
                *("POST", "/v1/responses/compact", self.compact, "Compact a conversation to what later requests need."),
                reads=CompactRequest,
                returns=CompactedResponse,
                needs=Scope.INFERENCE,
                idempotent=True,
                least_output=1,
            ),
            Route(
                *("GET", one, self.show, "A stored response, whole or as the events of its stream."),
                returns=ResponseResource,
                streams=ResponseEvent,
                query=RetrieveQuery,
                needs=Scope.INFERENCE,
            ),
            Route(
                *("DELETE", one, self.delete, "Delete a stored response."),
                returns=ResponseDeleted,
                needs=Scope.INFERENCE,
            ),
            Route(
                *("POST", f"{one}/cancel", self.cancel, "Cancel a response in the background."),
                returns=ResponseResource,
                needs=Scope.INFERENCE,
            ),
            Route(
                *("GET", f"{one}/input_items", self.list_input, "The items of the input of a stored response."),
                returns=ItemList,
                query=ItemsQuery,
                needs=Scope.INFERENCE,
            ),
            *ConversationRoutes(self._store.conversations, strict=self._strict).routes(),
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Answers a conversation, whole or as a stream."""
        request = await exchange.decode(decode_responses, strict=self._strict)
        stores = request.store is not False and self._store.is_enabled
        if request.background and not stores:
            raise Unsupported(
                "This server stores no responses, so none can go on in the background. Send stream: true.",
                param="background",
            )
        request, stored = await self._resolve(exchange, request)
        history, earlier = await self._read_history(exchange, stored)
        window = await self._compactions.open_last(exchange, earlier, request.items())
        chat, beyond_chat = convert_to_chat(request, earlier, window)
        vars(request)["ignored_fields"] = (*request.ignored_fields, *unread_items(earlier))
        compaction = None
        if request.context_management or window:
            items = [item for _, item in conversation_items(request, earlier, window)]
            compaction = await self._plan_compaction(exchange, request, chat, items)
        keeps = stores or isinstance(exchange, ResponsesTurn)
        written = written_items(items) if window else [*history, *request.written_items()]
        fields = native_fields(request.sent, written, keeps_state=keeps)
        native = NativeRequest("responses", fields, beyond_chat=beyond_chat)
        formatter = ResponsesFormatter(
            _new_resource(request, exchange.id_for("resp").replace("-", "_"), stores=stores),
            exchange.context,
            custom_tools=custom_tools(chat),
            with_logprobs="message.output_text.logprobs" in request.includes,
            with_encrypted_reasoning="reasoning.encrypted_content" in request.includes,
        )
        if stores:
            exchange.context.stored_as = formatter.resource.id
        if request.background:
            response = BackgroundResponse(self._to_row(exchange, request, formatter), formatter)
            generate = partial(self._generate, request, chat, native, formatter, compaction=compaction)
            await self._background.answer(exchange, response, generate, streams=request.streams)
            return
        if stores and request.streams and isinstance(exchange, RecordedExchange):
            self._background.keep_events(exchange, formatter.resource.id)
        exchange.error_events = formatter.error_events
        keep = partial(self._keep, exchange, request, formatter, stored) if keeps else None

        async def send(answer: ResponseStream) -> None:
            await send_response(
                exchange,
                answer if request.streams else formatter.read(answer),
                formatter,
                choices=1,
                streams=request.streams,
                heartbeat_s=self._heartbeat_s,
                before_end=keep,
            )

        try:
            await self._generate(request, chat, native, formatter, exchange=exchange, read=send, compaction=compaction)
        finally:
            await self._store.give_up(formatter.resource.id)

    async def _generate(
        self,
        request: ResponsesRequest,
        chat: ChatRequest,
        native: NativeRequest,
        formatter: ResponsesFormatter,
        exchange: HttpExchange,
        read: Read,
        *,
        compaction: "_CompactionPlan | None",
    ) -> None:
        """Generates the answer to a request, and hands it to a reader."""
        while True:
            try:
                with _own_params(native.beyond_chat):
                    if compaction is not None:
                        await self._compact_and_answer(request, compaction, formatter, exchange, read)
                        return
                    inference_request = _with_headers(_to_inference_request(request, chat), exchange)
                    generates = not isinstance(exchange, ResponsesTurn) or exchange.event.generate
                    if not generates:
                        # One token is the least that a replica generates; then the prompt is in its prefix cache.
                        inference_request = replace(inference_request, max_tokens=1, escalate=False)
                        if native.beyond_chat is not None:
                            raise native.beyond_chat
                    else:
                        inference_request = replace(inference_request, native=native)
                    async with self._service.generate(inference_request, exchange.context) as answer:
                        await read(answer if generates else _drop_text(answer))
                return
            except ContextLengthExceeded as error:
                may_drop = request.truncation == "auto" and not (formatter.has_started or formatter.has_compaction)
                read_first = chat if compaction is None else compaction.chat
                shorter = drop_oldest_turns(read_first, _share_that_fits(error)) if may_drop else None
                if shorter is None:
                    raise
                if compaction is None:
                    chat = shorter
                    turns = sum(message.role == "user" for message in chat.messages)
                    items = keep_latest_turns(native.fields["input"], turns)
                    native = replace(native, fields={**native.fields, "input": items})
                else:
                    compaction = replace(compaction, chat=shorter)

    async def _plan_compaction(
        self,
        exchange: HttpExchange,
        request: ResponsesRequest,
        chat: ChatRequest,
        items: Sequence[InputItem],
    ) -> "_CompactionPlan | None":
        """Returns how the conversation is compacted before the answer; None: it is not.

        Args:
            exchange: The exchange of the request.
            request: The request.
            chat: The chat completion for all of the conversation.
            items: Items of the conversation.
        """
        entries = request.context_management
        if not entries or (isinstance(exchange, ResponsesTurn) and not exchange.event.generate):
            return None
        parts = compact_earlier(items)
        if parts is None:
            return None
        with _own_params():
            counted = await self._service.count_tokens(exchange.principal, _to_inference_request(request, chat))
        if counted.tokens <= min(entry.compact_threshold or self._usual_threshold(exchange, chat) for entry in entries):
            return None
        await self._compactions.prepare()
        earlier, window = parts
        return _CompactionPlan(summary_chat(to_chat(replace(request, input=earlier))), window)

    def _usual_threshold(self, exchange: HttpExchange, chat: ChatRequest) -> float:
        """Returns the tokens beyond which a conversation is compacted where the request names no number."""
        try:
            return _COMPACT_SHARE * self._service.card(exchange.principal, chat.model).max_sequence_tokens
        except ReplicaUnavailable:
            return math.inf

    async def _compact_and_answer(
        self,
        request: ResponsesRequest,
        plan: "_CompactionPlan",
        formatter: ResponsesFormatter,
        exchange: HttpExchange,
        read: Read,
    ) -> None:
        """Generates a summary and then the answer; for the reader both are one answer."""
        inference_request = _with_headers(_to_inference_request(request, plan.chat), exchange)
        async with AsyncExitStack() as stack:
            summary_request = with_half_the_cost(for_summary(inference_request))
            summary = await open_summary(self._service, summary_request, exchange.context, stack)

            async def answer_after() -> AsyncGenerator[list[TextDelta]]:
                context = exchange.context
                window = await read_summary(summary, context, plan.window)
                await stack.aclose()  # the answer may need what the summary has held
                item = CompactionItem(encrypted_content=await self._compactions.seal(exchange, window))
                context.compaction = Compaction(context.model, context.usage)
                formatter.add_compaction(window, item.encrypted_content, context.usage)
                context.reset_for_next_answer()
                yield []  # so that a stream has what it paid for, whatever becomes of the answer
                chat = to_chat(replace(request, input=[item]), window=window)
                answer_request = with_half_the_cost(_with_headers(_to_inference_request(request, chat), exchange))
                async with self._service.generate(answer_request, context) as answer:
                    async for parts in answer:
                        yield parts

            async with aclosing(answer_after()) as answers:
                await read(answers)

    async def compact(self, exchange: HttpExchange) -> None:
        """Compacts a conversation: messages of the user stay, and a summary stands for all other items."""
        request = await exchange.decode(decode_compact, strict=self._strict)
        request, stored = await self._resolve(exchange, request)
        _, history = await self._read_history(exchange, stored)
        window = await self._compactions.open_last(exchange, history, request.items())
        items = conversation_items(request, history, window)
        if not items:
            raise InvalidRequest("input has no items to compact.", param="input")
        chat = summary_chat(to_chat(request, history, window))
        await self._compactions.prepare()
        with _own_params():
            inference_request = for_summary(_with_headers(_to_inference_request(request, chat), exchange))
            async with AsyncExitStack() as stack:
                answer = await open_summary(self._service, inference_request, exchange.context, stack)
                window = await read_summary(answer, exchange.context, compact_all([item for _, item in items]))
        response_id = exchange.id_for("resp").replace("-", "_")
        kept = with_ids(
            written_items(item for place, item in items if is_user_message(item) and place != SUMMARY_PLACE),
            response_id.removeprefix("resp_") + "_",
        )
        item_id = f"cmp_{response_id.removeprefix('resp_')}_{len(kept)}"
        item = OutputCompaction.of(item_id, window, await self._compactions.seal(exchange, window))
        await exchange.respond(
            encode(
                CompactedResponse(
                    id=response_id,
                    created_at=int(time.time()),
                    output=[*kept, to_builtins(item)],
                    usage=ResponseUsage.of(exchange.context.usage),
                )
            )
        )

    async def count(self, exchange: HttpExchange) -> None:
        """Counts the tokens of an input as the model would read them."""
        request = await exchange.decode(decode_input_tokens, strict=self._strict)
        request, stored = await self._resolve(exchange, request)
        _, history = await self._read_history(exchange, stored)
        chat = to_chat(request, history, await self._compactions.open_last(exchange, history, request.items()))
        exchange.context.ignored_fields = request.ignored_fields
        with _own_params():
            counted = await self._service.count_tokens(exchange.principal, _to_inference_request(request, chat))
        await exchange.respond(encode(InputTokens(input_tokens=counted.tokens, estimated=counted.estimated or UNSET)))

    async def show(self, exchange: HttpExchange) -> None:
        """Returns a stored response."""
        stored = await self._find(exchange)
        streams, starting_after = _read_query(dict(exchange.query))
        includes = read_includes(exchange.query)
        if streams:
            # Its events are those that were sent, with what was asked for then.
            exchange.context.ignored_fields = [f"include ({name})" for name in includes]
            await self._background.stream(exchange, stored, starting_after)
            return
        body = self._background.resource_of(stored)
        if includes:
            resource = decode_item(body)
            exchange.context.ignored_fields = include_parts(resource, decode_items(stored.output), includes)
            body = encode(resource)
        await exchange.respond(body)

    async def delete(self, exchange: HttpExchange) -> None:
        """Deletes a stored response; one that runs in the background is cancelled."""
        stored = await self._find(exchange)
        if not await self._background.delete(exchange.principal, stored):
            raise _not_found(exchange.parameter)
        await exchange.respond(encode(ResponseDeleted(id=exchange.parameter)))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Cancels a response in the background, and returns it; one that has ended stays as it is."""
        stored = await self._find(exchange)
        if not decode_item(stored.resource)["background"]:
            raise InvalidRequest(
                "Only a response that was made with background: true can be cancelled. Close the connection of any "
                "other.",
                param="id",
            )
        await exchange.respond(await self._background.cancel(exchange.principal, stored))

    async def list_input(self, exchange: HttpExchange) -> None:
        """Returns a page of the items of a response's own input."""
        exchange.context.ignored_fields = ignored_includes(read_includes(exchange.query))
        items = decode_items((await self._find(exchange)).input)
        await exchange.respond(encode(page_of(items, dict(exchange.query))))

    async def _find(self, exchange: HttpExchange) -> StoredResponse:
        found = await self._store.find(exchange.principal, exchange.parameter)
        if found is None:
            raise _not_found(exchange.parameter)
        return found

    async def _resolve(self, exchange: HttpExchange, request: R) -> tuple[R, Sequence[bytes]]:
        """Returns the request with the items that its references name, and the conversation before it as stored."""
        stored: Sequence[bytes] = ()
        if request.previous_response_id is not None:
            stored = await self._find_conversation(exchange, request.previous_response_id)
        if (conversation_id := request.conversation_id) is not None:
            conversations = self._store.conversations
            if await conversations.find(exchange.principal, conversation_id) is None:
                raise ResourceNotFound(
                    f"Conversation with id '{conversation_id[:64]}' not found. Begin one by POST /v1/conversations.",
                    param="conversation",
                )
            stored = [b"[%b]" % entry.item for entry in await conversations.items(conversation_id)]
        if isinstance(request.input, list) and any(isinstance(item, ItemReference) for item in request.input):
            entries, _ = await self._read_history(exchange, stored)
            known = {"": {entry["id"]: entry for entry in entries}}
            items = [await self._find_referenced_item(exchange, item, known) for item in request.written_items()]
            request = with_input(request, items)
        return request, stored

    async def _find_conversation(self, exchange: HttpExchange, response_id: str) -> Sequence[bytes]:
        """Returns the items of a response and of all before it, from its WebSocket or from the store."""
        if isinstance(exchange, ResponsesTurn) and (recent := exchange.recent.find(response_id)) is not None:
            return recent
        turns = await self._store.conversation(exchange.principal, response_id)
        missing = response_id if not turns else turns[0].previous
        if missing is not None:
            raise PreviousResponseNotFound(
                f"Previous response with id '{missing[:64]}' not found. It was never stored, it was deleted, or its "
                "time is over. Send the whole conversation in input.",
                param="previous_response_id",
            )
        if turns[-1].owner is not None:
            raise InvalidRequest(
                f"Previous response with id '{response_id}' is still in progress. Go on with it when it has ended.",
                param="previous_response_id",
            )
        return [items for turn in turns for items in (turn.input, turn.output)]

    async def _read_history(
        self, exchange: HttpExchange, stored: Sequence[bytes]
    ) -> tuple[list[dict[str, Any]], list[InputItem]]:
        """Reads the items of stored lists, many of them beside the event loop, as a large body; see `read_history`."""
        size = sum(map(len, stored))
        if size <= LARGE_BODY_BYTES:
            return read_history(stored)
        return await self._threads.run(exchange.principal, size, partial(read_history, stored))

    async def _find_referenced_item(
        self, exchange: HttpExchange, item: dict[str, Any], known: dict[str, dict[str, dict[str, Any]]]
    ) -> dict[str, Any]:
        """Returns the item that a reference names, or any other item as it is.

        The id of an item has the digits of its response, unless a server has given it.

        Args:
            exchange: The exchange of the request.
            item: An item of the input.
            known: Response -> its items by their ids; those of the conversation before the request have no response.
        """
        if item["type"] != "item_reference":
            return item
        item_id: str = item["id"]
        for items in known.values():
            if item_id in items:
                return items[item_id]
        found = None
        if item_id.count("_") > 1:
            found = await self._store.find(exchange.principal, f"resp_{item_id.split('_')[1]}")
        found = found or await self._store.find_by_item(exchange.principal, item_id)
        if found is None:
            return item
        stored = decode_items(found.input) + decode_items(found.output)
        known[found.id] = {entry["id"]: entry for entry in stored}
        return known[found.id].get(item_id, item)

    async def _keep(
        self,
        exchange: HttpExchange,
        request: ResponsesRequest,
        formatter: ResponsesFormatter,
        before: Sequence[bytes],
        choices: Sequence[CollectedChoice],
    ) -> None:
        """Keeps a response for a later request, before its client gets the end of it.

        Args:
            exchange: The exchange of the request; that of a WebSocket keeps it for its next turn.
            request: The request.
            formatter: Has the response; if it cannot be stored, the response says so.
            before: The conversation before the request.
            choices: The choices of a whole answer.
        """
        if choices:
            formatter.collect(choices)
        formatter.complete(exchange.context.usage)
        items = formatter.items_to_keep()
        stored = replace(
            self._to_row(exchange, request, formatter),
            output=encode(items),
            item_ids=foreign_ids(items, formatter.digits),
            # The event that ends a stream is written after this.
            last_event=None if formatter.last_event is None else formatter.last_event + 1,
        )
        if isinstance(exchange, ResponsesTurn):
            conversation = () if formatter.has_compaction else (*before, stored.input)
            exchange.recent.keep(exchange.event.stream_id, stored.id, (*conversation, stored.output))
        if not formatter.resource.store:
            return
        try:
            await self._store.save(stored)
        except StoreUnavailable as error:
            log.warning("Response %s cannot be stored: %s", stored.id, error)
            formatter.resource = replace(formatter.resource, store=False)

    def _to_row(
        self, exchange: HttpExchange, request: ResponsesRequest, formatter: ResponsesFormatter
    ) -> StoredResponse:
        """Returns a response as it is stored, without its output."""
        resource, principal = formatter.resource, exchange.principal
        created_s, expires_s = self._store.lifetime()
        return StoredResponse(
            id=resource.id,
            tenant=principal.tenants[0],
            organisation=principal.tenants[-1],
            # A compaction item stands for all before it, so the conversation begins here for who goes on with it.
            previous=None if formatter.has_compaction else request.previous_response_id,
            conversation=request.conversation_id,
            created_s=created_s,
            expires_s=expires_s,
            input=encode(with_ids(request.written_items(), resource.id.removeprefix("resp_") + "_in")),
            output=b"[]",
            resource=formatter.written(),
        )


class _CompactionPlan(msgspec.Struct, frozen=True):
    """How a conversation is compacted before an answer."""

    chat: ChatRequest
    """The chat completion that summarises its earlier items."""
    window: CompactedWindow
    """Window that stands for these items then, still without the summary."""


async def _drop_text(answer: ResponseStream) -> AsyncIterator[list[TextDelta]]:
    """Reads an answer to its end, and yields one batch without text."""
    async for _ in answer:
        pass
    yield []


def _share_that_fits(error: ContextLengthExceeded) -> float:
    """Returns the share of a prompt that leaves room for the answer, as far as the error says it."""
    if not (error.window and error.prompt_tokens):
        return _UNKNOWN_SHARE
    prompt_tokens = error.window - (error.max_tokens or error.window // 8)
    return min(1.0, max(0.0, prompt_tokens / error.prompt_tokens))


@contextmanager
def _own_params(own_error: MaitredError | None = None) -> Iterator[None]:
    """Names the fields of this API in errors that name those of the equivalent chat completion.

    Args:
        own_error: An error that names the fields of this API already.
    """
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and error is not own_error:
            error.param = rename_param(error.param)
        raise


def _to_inference_request(request: InputTokensRequest, chat: ChatRequest) -> InferenceRequest:
    """Converts a request for a response, whose chat completion is known, into an inference request."""
    inference_request = to_inference_request(chat)
    if custom_tools(chat):
        of_functions = with_functions_only(chat)
        hints = unsupported_by_engine(of_functions).ignored
        if any("format" in tool.get("custom", ()) for tool in chat.tools or ()):
            hints = (*hints, "tools.format")
        inference_request = replace(inference_request, tools=partial(to_tool_rules, of_functions), hints=hints)
    if isinstance(request, ResponsesRequest) and request.store is False:
        inference_request = replace(inference_request, cache=to_cache_control(request.cache, store=False))
    return replace(
        inference_request,
        max_tokens_param="max_output_tokens",
        prompt_param="input",
        needs=tuple(map(_own_path, inference_request.needs)),
        hints=tuple(map(rename_param, inference_request.hints)),
        left_out=request.ignored_fields,
    )


def _with_headers(inference_request: InferenceRequest, exchange: HttpExchange) -> InferenceRequest:
    return apply_request_headers(inference_request, exchange.header, retries=exchange.retries)


def _own_path(path: str) -> str:
    """Returns a path into the messages of a chat completion as one into the input."""
    return rename_param(without_positions(path)) if path.startswith("messages[") else path


def _new_resource(request: ResponsesRequest, response_id: str, *, stores: bool) -> ResponseResource:
    """Returns the response to a request before its output."""
    given = {
        name: value
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "truncation")
        if (value := getattr(request, name)) is not None
    }
    text = request.text
    form = None if text is None else text.format
    return ResponseResource(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=request.background is True,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        conversation=None if request.conversation_id is None else ConversationName(id=request.conversation_id),
        reasoning={"effort": None, "summary": None, **to_builtins(request.reasoning)} if request.reasoning else None,
        store=stores,
        text={
            "format": form or {"type": "text"},
            **({} if text is None or text.verbosity is None else {"verbosity": text.verbosity}),
        },
        tool_choice=request.tool_choice or "auto",
        tools=[_described_tool(tool) for tool in request.tools or ()],
        user=request.user,
        metadata=request.metadata or {},
        service_tier="default" if request.service_tier in (None, "auto") else request.service_tier,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        **given,
    )


def _described_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool with all members that a function has in a response, and without credentials of its server."""
    defaults = {"description": None, "parameters": None, "strict": None} if tool.get("type") == "function" else {}
    described = {**defaults, **tool}
    described.pop("authorization", None)
    if isinstance(headers := tool.get("headers"), dict):
        described["headers"] = dict.fromkeys(headers, _REDACTED)
    return described


def _not_found(response_id: str) -> ResourceNotFound:
    return ResourceNotFound(
        f"Response with id '{response_id[:64]}' not found. It was never stored, it was deleted, or its time is over.",
        param="id",
    )


def _read_query(query: Mapping[str, str]) -> tuple[bool, int | None]:
    """Returns whether a response is read as a stream, and the number of the event after which it begins.

    Raises:
        InvalidRequest: A parameter has another form.
    """
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream must be true or false.", param="stream")
    if after is None:
        return stream == "true", None
    if not (after.isascii() and after.isdigit() and len(after) <= _MAX_DIGITS):
        raise InvalidRequest("starting_after must be the sequence_number of an event.", param="starting_after")
    if stream == "false":
        raise InvalidRequest("starting_after needs stream=true.", param="starting_after")
    return True, int(after)
