"""`POST /v1/messages`: any of our models for clients that speak Anthropic.

A request becomes the chat completion that means the same and goes the same way from there; only what goes out again
has another shape.
"""

from collections.abc import Iterator, Sequence

from maitred.api.call import Call
from maitred.api.chat import ask_of
from maitred.api.delivery import WholeChoice, deliver
from maitred.api.dialect import ANTHROPIC
from maitred.api.routes import Route
from maitred.api.urgency import with_urgency
from maitred.core.answer import Answering, Conversation, Part, Tally
from maitred.core.ids import new_object_id
from maitred.core.request import FinishReason, Usage
from maitred.core.tenancy import Scope
from maitred.wire.anthropic.decode import check_version, decode_count, decode_messages
from maitred.wire.anthropic.inbound import chat_of
from maitred.wire.anthropic.requests import CountTokensRequest, MessagesRequest
from maitred.wire.anthropic.responses import (
    BlockDelta,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    MessageDelta,
    MessagesAnswer,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopDelta,
    StreamEvent,
    TokenCount,
    encode,
    encode_stream_event,
)


class MessagesRoutes:
    """Messages, and their length in tokens.

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
        """Both routes."""
        return [
            Route(
                "POST",
                "/v1/messages",
                self.create,
                "Answer a conversation in the form of Anthropic's API.",
                reads=MessagesRequest,
                returns=MessagesAnswer,
                streams=StreamEvent,
                needs=Scope.INFERENCE,
                idempotent=True,
                dialect=ANTHROPIC,
            ),
            Route(
                "POST",
                "/v1/messages/count_tokens",
                self.count,
                "How many tokens a conversation is to the model.",
                reads=CountTokensRequest,
                returns=TokenCount,
                needs=Scope.INFERENCE,
                dialect=ANTHROPIC,
            ),
        ]

    async def create(self, call: Call) -> None:
        """Answers a conversation."""
        check_version(call.header(b"anthropic-version"))
        request = decode_messages(call.body, strict=self._strict)
        ask = with_urgency(ask_of(chat_of(request)), call.header, retries=call.retries)
        async with self._answering.answer(ask, call.tally) as answer:
            shape = MessagesShape(request.model, call.tally)
            await deliver(call, answer, shape, choices=1, streams=request.streams, heartbeat_s=self._heartbeat_s)

    async def count(self, call: Call) -> None:
        """Counts a conversation's tokens, as its model would read it."""
        check_version(call.header(b"anthropic-version"))
        chat = chat_of(decode_count(call.body, strict=self._strict))
        prompt = Conversation(chat.conversation())
        tokens = await self._answering.tokenize(call.principal, chat.model, prompt, add_special_tokens=None)
        await call.respond(encode(TokenCount(input_tokens=len(tokens))))


class MessagesShape:
    """Writes one answer: a message with one block of text.

    Args:
        model: As the client names it.
        tally: The request's, for its usage so far.
    """

    def __init__(self, model: str, tally: Tally) -> None:
        self._id = new_object_id("msg").replace("-", "_")
        self._model = model
        self._tally = tally
        self._stop = StopDelta()

    def opening(self) -> bytes:
        """The message without its content, and the beginning of its one block."""
        return encode_stream_event(
            MessageStart(message=self._answer([], StopDelta(), self._tally.usage))
        ) + encode_stream_event(ContentBlockStart(index=0, content_block=ContentBlock(type="text", text="")))

    def events(self, parts: Sequence[Part]) -> bytes:
        """One event for new text, and one for the end of the block."""
        return b"".join(encode_stream_event(event) for part in parts for event in self._events(part))

    def closing(self, usage: Usage) -> bytes:
        """Why it ended, and what was used."""
        return encode_stream_event(MessageDelta(delta=self._stop, usage=MessageUsage.of(usage))) + encode_stream_event(
            MessageStop()
        )

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The answer as one object."""
        (choice,) = choices
        text = "".join(choice.text)
        # Clients send an answer back as a part of the next conversation, where an empty block is a fault.
        content = [ContentBlock(type="text", text=text)] if text else []
        return encode(self._answer(content, _stop_of(choice.finish, choice.stop), usage))

    def _events(self, part: Part) -> Iterator[StreamEvent]:
        if part.text:
            yield ContentBlockDelta(index=0, delta=BlockDelta(type="text_delta", text=part.text))
        if part.finish is not None:
            self._stop = _stop_of(part.finish, part.stop)
            yield ContentBlockStop(index=0)

    def _answer(self, content: list[ContentBlock], stop: StopDelta, usage: Usage) -> MessagesAnswer:
        return MessagesAnswer(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=MessageUsage.of(usage),
        )


def _stop_of(finish: FinishReason, stop: str | None) -> StopDelta:
    """Why an answer ended, in Anthropic's words. Theirs for a part of an answer is the one for too many tokens."""
    if stop is not None:
        return StopDelta(stop_reason="stop_sequence", stop_sequence=stop)
    return StopDelta(stop_reason="end_turn" if finish is FinishReason.STOP else "max_tokens")
