"""Route `POST /v1/chat/completions`: chat completions, as whole responses or as event streams.

Most answers consist of one text only. Such answers are written with templates, which are made from the encoder's output
once, at import.
"""

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType, to_builtins
from msgspec.structs import replace

from maitred.api.exchange import HttpExchange
from maitred.api.headers import apply_request_headers
from maitred.api.routes import Route
from maitred.api.streaming import CollectedChoice, send_response
from maitred.core.context import RequestContext
from maitred.core.inference import DEFAULT_CACHE_CONTROL, ChunkMetadata, Conversation, InferenceRequest, TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.core.service import InferenceService
from maitred.core.tenancy import Scope
from maitred.text.generation_defaults import DEFAULTED
from maitred.wire.cache_control import to_cache_control
from maitred.wire.openai.decode import decode_chat, unsupported_by_engine
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.openai.responses import (
    CONTINUED,
    THOUGHT_FIELDS,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Finish,
    Marks,
    UsageBody,
    add_metadata,
    encode,
    have_members,
    prompt_logprobs,
    score_entries,
    to_finish_reason,
    to_stop_reason,
    usage_so_far,
    without_tokens,
)
from maitred.wire.openai.sampling import (
    CONSTRAINT_FIELDS,
    TOKEN_FIELDS,
    TOOL_FIELDS,
    to_constraint,
    to_sampling_params,
    to_tool_rules,
    token_fields,
    unset_fields,
)
from maitred.wire.openai.written import merge_deltas, request_fields, thinking_blocks
from maitred.wire.sse import EventTemplates, JsonTemplate, encode_event, encode_text

_WITHOUT_CONTENT = frozenset({"tool_calls", "function_call", "audio"})
"""Members of a message whose content is null if it has no text."""
_DELTA_FIELDS = frozenset(ChatDelta.__struct_fields__)
_MESSAGE_FIELDS = frozenset(ChatMessage.__struct_fields__)
_HIDDEN_REASONING = (*THOUGHT_FIELDS, "reasoning_details")
_NO_METADATA = ChunkMetadata()
_CACHE_FIELDS = frozenset({"cache", "store"})


class ChatFormatter:
    """Writes one chat answer as JSON or as events.

    Args:
        request: The request that is answered.
        answer_id: The id of the answer.
        context: The request context, for the model that answers.
    """

    def __init__(self, request: ChatRequest, answer_id: str, context: RequestContext) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._context = context
        self._model = context.model
        self._choices = request.choices
        self._include_usage = request.include_usage
        self._include_continuous_usage = self._include_usage and request.include_continuous_usage
        self._of_functions = not request.tools and bool(request.functions)
        self._hidden = _HIDDEN_REASONING if request.include_reasoning is False else ()
        self._templates = EventTemplates()
        self._metadata: dict[int, ChunkMetadata] = {}
        """Members that the server sent around the deltas of each choice."""

    def start(self) -> bytes:
        """Returns the first event of every choice, which names the role of the speaker."""
        self._model = self._context.model
        opening = ChatDelta(role="assistant", content="")
        events = b""
        for index in range(self._choices):
            events += self._event(ChatChunkChoice(index=index, delta=opening), opens=True)
        return events

    def events(self, parts: Sequence[TextDelta]) -> bytes:
        """Returns one event for new text, and a separate event for the end of a choice."""
        events, from_template, in_full = b"", self._templates.encode, self._text
        if self._include_continuous_usage:
            return b"".join(map(self._encode_part, parts))
        for part in parts:
            events += from_template(part.index, part.text, in_full) if part.plain else self._encode_part(part)
        return events

    def end(self, usage: Usage) -> bytes:
        """Returns the usage, if the request asked for it, in a chunk without choices."""
        if not self._include_usage:
            return b""
        chunk = self._chunk([], UsageBody.of(usage))
        if not self._metadata and usage.details is None:
            return encode_event(encode(chunk))
        return encode_event(encode(add_metadata(to_builtins(chunk), [*self._metadata.values()], usage)))

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Returns the answer as one JSON object."""
        self._model = self._context.model
        if len(choices) != 1 or not choices[0].plain or usage.reasoning_tokens or usage.estimated or usage.details:
            return self.in_full(choices, usage)
        return _PLAIN.fill(
            (
                *(encode_text(self._id), self._created, encode_text(self._model)),
                *(encode_text("".join(choices[0].text)), encode_text(self._finish_of(choices[0].finish))),
                *(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens),
            )
        )

    def in_full(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Returns the whole answer as JSON, for any content."""
        messages = [self._visible_extra(merge_deltas(choice.extras)) for choice in choices]
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=self._message(choice, messages[index]),
                    logprobs=None if choice.scores is None else ChatLogprobs.of(choice.scores),
                    finish_reason=self._finish_of(choice.finish),
                    stop_reason=to_stop_reason(choice.finish, choice.stop),
                    token_ids=UNSET if choice.token_ids is None else choice.token_ids,
                )
                for index, choice in enumerate(choices)
            ],
            usage=UsageBody.of(usage),
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=prompt_logprobs(choices[0].prompt_scores),
        )
        others = [_without(extra, _MESSAGE_FIELDS) for extra in messages]
        has_more = any(choice.metadata or have_members(choice.scores) for choice in choices)
        if usage.details is None and not any(others) and not has_more:
            return encode(completion)
        fields = to_builtins(completion)
        for choice_fields, extra, choice in zip(fields["choices"], others, choices, strict=True):
            choice_fields["message"] |= extra
            if choice.scores is not None:
                choice_fields["logprobs"]["content"] = score_entries(choice.scores)
        return encode(add_metadata(fields, [choice.whole_metadata() for choice in choices], usage))

    def _text(self, index: int, text: str) -> bytes:
        if index in self._metadata:
            return self._event(ChatChunkChoice(index=index, delta=ChatDelta(content=text)))
        form = _TEXT_BEFORE_USAGE if self._include_usage else _TEXT
        values = encode_text(self._id), self._created, encode_text(self._model), index, encode_text(text)
        return form.fill(values)

    def _encode_part(self, part: TextDelta) -> bytes:
        """Encodes a delta of any kind, without a template."""
        if part.continued:  # what the first server said of itself is not true of the next one
            self._model = self._context.model
            self._metadata.clear()
            self._templates.clear()
        if part.metadata is not None:
            self._metadata[part.index] = part.metadata
            self._templates.pop(part.index, None)
        events = b""
        for choice in self._chunks_of(part):
            # The mark says where an answer goes on, so it is on one event alone.
            events += self._event(choice, part, continued=part.continued and not events)
            if part.metadata is not None:
                self._metadata[part.index] = without_tokens(part.metadata)
        return events

    def _chunks_of(self, part: TextDelta) -> Iterable[ChatChunkChoice]:
        extra = self._visible_extra(part.extra) if part.extra else {}
        has_tokens = part.scores or part.token_ids
        if part.text or has_tokens or extra or (part.metadata is not None and part.finish is None):
            # Missing text differs from an empty text: clients use it to tell tool calls from answers.
            content = part.text if part.text or not (extra or part.metadata) else UNSET
            delta = ChatDelta(content=content, **{name: extra[name] for name in extra if name in _DELTA_FIELDS})
            logprobs = None if part.scores is None else ChatLogprobs.of(part.scores)
            token_ids = UNSET if part.token_ids is None else part.token_ids
            yield ChatChunkChoice(index=part.index, delta=delta, logprobs=logprobs, token_ids=token_ids)
        if part.finish is not None:
            yield ChatChunkChoice(
                index=part.index,
                delta=ChatDelta(),
                finish_reason=self._finish_of(part.finish),
                stop_reason=to_stop_reason(part.finish, part.stop),
            )

    def _message(self, choice: CollectedChoice, extra: dict[str, Any]) -> ChatMessage:
        text = "".join(choice.text)
        if blocks := thinking_blocks(extra):
            # Only chunks need the index, and the client sends the message back within the next conversation.
            without_index = [{name: block[name] for name in block if name != "index"} for block in blocks]
            extra = {**extra, "thinking_blocks": without_index}
        return ChatMessage(
            content=text if text or not _WITHOUT_CONTENT.intersection(extra) else None,
            **{name: value for name, value in extra.items() if name in _MESSAGE_FIELDS},
        )

    def _visible_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Returns a message's additional members, under the names that the client knows and wants."""
        if self._of_functions and "tool_calls" in extra:
            extra = _with_function_call(extra)
        if not self._hidden:
            return extra
        if "content_blocks" in extra:
            shown = [block for block in extra["content_blocks"] if "thinking" not in block.get("type", "")]
            extra = {**extra, "content_blocks": shown}
        return {name: value for name, value in extra.items() if name not in self._hidden}

    def _finish_of(self, reason: FinishReason) -> Finish:
        return "function_call" if self._of_functions and reason is FinishReason.TOOL_CALLS else to_finish_reason(reason)

    @property
    def _prompt_token_ids(self) -> list[int] | UnsetType:
        prompts = self._context.prompt_token_ids
        return [*prompts[0]] if prompts else UNSET

    def _event(
        self, choice: ChatChunkChoice, part: TextDelta | None = None, *, opens: bool = False, continued: bool = False
    ) -> bytes:
        marks = CONTINUED if continued else UNSET
        usage = usage_so_far(self._context.usage, opens=opens) if self._include_continuous_usage else None
        chunk = self._chunk([choice], usage if self._include_usage else UNSET, marks)
        if opens and self._context.prompt_token_ids:
            chunk = replace(chunk, prompt_token_ids=self._prompt_token_ids)
        metadata = self._metadata.get(choice.index, _NO_METADATA)
        extra = None if part is None or choice.finish_reason is not None else part.extra
        others = (
            _without(extra, {*_DELTA_FIELDS, *self._hidden}) if extra and not _DELTA_FIELDS.issuperset(extra) else {}
        )
        scores = None if part is None or choice.logprobs is None else part.scores
        if metadata is _NO_METADATA and not others and (scores is None or not have_members(scores)):
            return encode_event(encode(chunk))
        fields = to_builtins(chunk)
        fields["choices"][0]["delta"] |= others
        if scores is not None:
            fields["choices"][0]["logprobs"]["content"] = score_entries(scores)
        return encode_event(encode(add_metadata(fields, [metadata], None)))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None, marks: Marks | UnsetType = UNSET
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, maitred=marks
        )


def _with_function_call(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members of a message whose first call is the only one that the old API has a place for."""
    numbered = [(call.get("index", place), call) for place, call in enumerate(extra["tool_calls"])]
    functions = [call.get("function") or {} for number, call in numbered if number == 0]
    others = [call for number, call in numbered if number != 0]
    message = {name: value for name, value in extra.items() if name != "tool_calls"}
    if functions:
        named = [function["name"] for function in functions if function.get("name")]
        given = "".join(function.get("arguments") or "" for function in functions)
        message["function_call"] = {**({"name": named[0]} if named else {}), "arguments": given}
    return {**message, "tool_calls": others} if others else message


def _without(extra: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Returns the other members."""
    return {name: value for name, value in extra.items() if name not in names}


def _text_form(usage: UsageBody | UnsetType | None) -> JsonTemplate:
    """Returns the template of an event that has nothing but a text."""
    choice = ChatChunkChoice(index=1002, delta=ChatDelta(content="a text"))
    chunk = ChatChunk(id="an id", created=1001, model="a model", choices=[choice], usage=usage)
    return JsonTemplate(encode_event(encode(chunk)), (b'"an id"', b"1001", b'"a model"', b"1002", b'"a text"'))


_TEXT = _text_form(UNSET)
_TEXT_BEFORE_USAGE = _text_form(None)
_PLAIN = JsonTemplate(
    encode(
        ChatCompletion(
            id="an id",
            created=1001,
            model="a model",
            choices=[ChatChoice(index=0, message=ChatMessage(content="a text"), finish_reason="stop")],
            usage=UsageBody.of(Usage(1002, 1003, 1004)),
        )
    ),
    (b'"an id"', b"1001", b'"a model"', b'"a text"', b'"stop"', b"1002", b"1003", b"2005", b"1004"),
)
"""Template of an answer with one choice that has only a text."""


class ChatRoutes:
    """Routes of chat completions in OpenAI's API.

    Args:
        answering: The inference service behind the API.
        strict: Whether unknown fields are refused.
        heartbeat_s: Longest time in seconds without an event on a stream.
    """

    def __init__(self, answering: InferenceService, *, strict: bool, heartbeat_s: float) -> None:
        self._service = answering
        self._strict = strict
        self._heartbeat_s = heartbeat_s

    def routes(self) -> list[Route]:
        """Returns the one route of chat completions."""
        return [
            Route(
                "POST",
                "/v1/chat/completions",
                self.create,
                "Answer a conversation, at once or as a stream of events.",
                reads=ChatRequest,
                returns=ChatCompletion,
                streams=ChatChunk,
                needs=Scope.INFERENCE,
                idempotent=True,
                least_output=1,
            )
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Answers a conversation, whole or as a stream."""
        request = await exchange.decode(decode_chat, strict=self._strict)
        inference_request = apply_request_headers(
            to_inference_request(request), exchange.header, retries=exchange.retries
        )
        async with self._service.generate(inference_request, exchange.context) as answer:
            await send_response(
                exchange,
                answer,
                ChatFormatter(request, exchange.id_for("chatcmpl"), exchange.context),
                choices=request.choices,
                streams=request.streams,
                heartbeat_s=self._heartbeat_s,
            )


def to_inference_request(request: ChatRequest) -> InferenceRequest:
    """Converts a chat request into an inference request."""
    sent, unsupported = request.sent, unsupported_by_engine(request)
    continues = request.continue_final_message is True
    return InferenceRequest(
        model=request.model,
        prompts=[
            Conversation(
                request.conversation(),
                add_generation_prompt=not continues and request.add_generation_prompt is not False,
                template_arguments=request.template_arguments(),
                continue_final_message=continues,
                chat_template=request.chat_template,
            )
        ],
        sampling=to_sampling_params(request, max_tokens=0, seed=0),
        unset_fields=unset_fields(request, DEFAULTED),
        max_tokens=request.token_limit,
        seed=request.seed,
        priority=request.requested_priority,
        stops=request.stops,
        stops_in_reasoning=request.stop_in_reasoning is True,
        **({} if TOKEN_FIELDS.isdisjoint(sent) else token_fields(request)),
        cache=DEFAULT_CACHE_CONTROL
        if _CACHE_FIELDS.isdisjoint(sent)
        else to_cache_control(request.cache, store=request.store),
        session=request.prompt_cache_key or None,
        user=request.user or None,
        max_tokens_param=request.token_limit_param,
        prompt_param="messages",
        whole=not request.streams,
        needs=unsupported.refused,
        hints=unsupported.ignored,
        tools=None if TOOL_FIELDS.isdisjoint(sent) else partial(to_tool_rules, request),
        to_openai=partial(request_fields, request),
        constraint=None if CONSTRAINT_FIELDS.isdisjoint(sent) else partial(to_constraint, request),
    )
