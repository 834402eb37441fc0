"""`POST /v1/chat/completions`."""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType

from maitred.api.call import Call
from maitred.api.delivery import WholeChoice, deliver
from maitred.api.routes import Route
from maitred.api.urgency import with_urgency
from maitred.core.answer import Answering, Ask, Conversation, Part, Score, TokenScore
from maitred.core.ids import new_object_id
from maitred.core.request import FinishReason, Usage
from maitred.core.tenancy import Scope
from maitred.text.generation_defaults import DEFAULTED
from maitred.wire.openai.decode import decode_chat
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.openai.responses import (
    CONTINUED,
    THOUGHT_FIELDS,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Finish,
    Marks,
    TopLogprob,
    UsageBody,
    encode,
    finish_of,
    stop_reason_of,
)
from maitred.wire.openai.rules import needs_of
from maitred.wire.openai.sampling import left_open, sampling_of
from maitred.wire.openai.structured import constraint_of
from maitred.wire.openai.tools import tool_rules_of
from maitred.wire.openai.written import merged_delta, written
from maitred.wire.sse import encode_event
from maitred.wire.stencil import Stencils

_CALLS = frozenset({"tool_calls", "function_call"})


class ChatRoutes:
    """Chat completions.

    Args:
        answering: The system behind the API.
        strict: Refuse unknown fields.
        heartbeat_s: Longest silence on a stream.
    """

    def __init__(self, answering: Answering, *, strict: bool, heartbeat_s: float) -> None:
        self._answering = answering
        self._strict = strict
        self._heartbeat_s = heartbeat_s

    def routes(self) -> list[Route]:
        """The one route."""
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
            )
        ]

    async def create(self, call: Call) -> None:
        """Answers a conversation."""
        request = decode_chat(call.body, strict=self._strict)
        ask = with_urgency(ask_of(request), call.header, retries=call.retries)
        async with self._answering.answer(ask, call.tally) as answer:
            await deliver(
                call,
                answer,
                ChatShape(request),
                choices=request.choices,
                streams=request.streams,
                heartbeat_s=self._heartbeat_s,
            )


class ChatShape:
    """Writes one chat answer."""

    def __init__(self, request: ChatRequest) -> None:
        self._id = new_object_id("chatcmpl")
        self._created = int(time.time())
        self._model = request.model
        self._choices = request.choices
        self._include_usage = request.include_usage
        self._of_functions = not request.tools and bool(request.functions)
        self._hidden = THOUGHT_FIELDS if request.include_reasoning is False else ()
        self._stencils = Stencils()

    def opening(self) -> bytes:
        """Every choice begins with who speaks."""
        opening = ChatDelta(role="assistant", content="")
        return b"".join(self._event(ChatChunkChoice(index=i, delta=opening)) for i in range(self._choices))

    def events(self, parts: Sequence[Part]) -> bytes:
        """One event for new text, and one of its own for the end of a choice."""
        event, full = self._stencils.event, self._text
        return b"".join([event(part.index, part.text, full) if part.plain else self._written(part) for part in parts])

    def closing(self, usage: Usage) -> bytes:
        """The usage, if asked for, in a chunk without choices."""
        return encode_event(encode(self._chunk([], UsageBody.of(usage)))) if self._include_usage else b""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The answer as one object."""
        return encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[
                    ChatChoice(
                        index=index,
                        message=self._message(choice),
                        logprobs=_logprobs(choice.scores),
                        finish_reason=self._finish_of(choice.finish),
                        stop_reason=stop_reason_of(choice.finish),
                    )
                    for index, choice in enumerate(choices)
                ],
                usage=UsageBody.of(usage),
            )
        )

    def _text(self, index: int, text: str) -> bytes:
        return self._written(Part(index, text))

    def _written(self, part: Part) -> bytes:
        return b"".join(self._event(choice, part) for choice in self._chunks_of(part))

    def _chunks_of(self, part: Part) -> Iterable[ChatChunkChoice]:
        extra = self._shown(part.extra or {})
        if part.text or part.scores or extra:
            # Text that is not there is not an empty text: clients tell tool calls from answers by it.
            content = part.text if part.text or not extra else UNSET
            delta = ChatDelta(content=content, **extra)
            yield ChatChunkChoice(index=part.index, delta=delta, logprobs=_logprobs(part.scores))
        if part.finish is not None:
            yield ChatChunkChoice(
                index=part.index,
                delta=ChatDelta(),
                finish_reason=self._finish_of(part.finish),
                stop_reason=stop_reason_of(part.finish),
            )

    def _message(self, choice: WholeChoice) -> ChatMessage:
        text = "".join(choice.text)
        extra = self._shown(merged_delta(choice.extras))
        return ChatMessage(content=text if text or not _CALLS.intersection(extra) else None, **extra)

    def _shown(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Members of a message as its reader knows them, without those that it does not want."""
        if self._of_functions and "tool_calls" in extra:
            calls = extra["tool_calls"]
            named = [call["function"]["name"] for call in calls if "name" in call["function"]]
            given = "".join(call["function"]["arguments"] for call in calls)
            called = {**({"name": named[0]} if named else {}), "arguments": given}
            extra = {name: value for name, value in extra.items() if name != "tool_calls"} | {"function_call": called}
        if not self._hidden:
            return extra
        return {name: value for name, value in extra.items() if name not in self._hidden}

    def _finish_of(self, reason: FinishReason) -> Finish:
        return "function_call" if self._of_functions and reason is FinishReason.TOOL_CALLS else finish_of(reason)

    def _event(self, choice: ChatChunkChoice, part: Part | None = None) -> bytes:
        marks = CONTINUED if part is not None and part.continued else UNSET
        return encode_event(encode(self._chunk([choice], None if self._include_usage else UNSET, marks)))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None, marks: Marks | UnsetType = UNSET
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, maitred=marks
        )


def ask_of(request: ChatRequest) -> Ask:
    """What a chat request asks, free of its shape."""
    return Ask(
        model=request.model,
        prompts=[Conversation(request.conversation(), template_arguments=request.template_arguments())],
        sampling=sampling_of(request, max_tokens=0, seed=0),
        left_open=left_open(request, DEFAULTED),
        max_tokens=request.token_limit,
        seed=request.seed,
        priority=request.asked_priority,
        stops=request.stops,
        session=request.prompt_cache_key or None,
        user=request.user or None,
        max_tokens_param=request.token_limit_param,
        prompt_param="messages",
        whole=not request.streams,
        needs=needs_of(request),
        tools=partial(tool_rules_of, request),
        written=partial(written, request),
        constraint=partial(constraint_of, request),
    )


def _logprobs(scores: list[TokenScore] | None) -> ChatLogprobs | None:
    if scores is None:
        return None
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=score.chosen.text,
                logprob=score.chosen.logprob,
                bytes=list(score.chosen.raw),
                top_logprobs=[_top(other) for other in score.top],
            )
            for score in scores
        ]
    )


def _top(score: Score) -> TopLogprob:
    return TopLogprob(token=score.text, logprob=score.logprob, bytes=list(score.raw))
