"""`POST /v1/chat/completions`."""

from functools import partial

from maitred.api.chat_format import ChatFormatter
from maitred.api.exchange import HttpExchange
from maitred.api.priority_headers import with_urgency
from maitred.api.routes import Route
from maitred.api.streaming import deliver
from maitred.core.answer import Conversation, InferenceRequest, InferenceService
from maitred.core.tenancy import Scope
from maitred.text.generation_defaults import DEFAULTED
from maitred.wire.openai.decode import decode_chat
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.openai.responses import ChatChunk, ChatCompletion
from maitred.wire.openai.rules import needs_of
from maitred.wire.openai.sampling import left_open, sampling_of
from maitred.wire.openai.structured import constraint_of
from maitred.wire.openai.tools import tool_rules_of
from maitred.wire.openai.written import written


class ChatRoutes:
    """Chat completions.

    Args:
        answering: The system behind the API.
        strict: Refuse unknown fields.
        heartbeat_s: Longest silence on a stream.
    """

    def __init__(self, answering: InferenceService, *, strict: bool, heartbeat_s: float) -> None:
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

    async def create(self, call: HttpExchange) -> None:
        """Answers a conversation."""
        request = decode_chat(call.body, strict=self._strict)
        ask = with_urgency(ask_of(request), call.header, retries=call.retries)
        async with self._answering.answer(ask, call.tally) as answer:
            await deliver(
                call,
                answer,
                ChatFormatter(request, call.named("chatcmpl")),
                choices=request.choices,
                streams=request.streams,
                heartbeat_s=self._heartbeat_s,
            )


def ask_of(request: ChatRequest) -> InferenceRequest:
    """What a chat request asks, free of its shape."""
    return InferenceRequest(
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
