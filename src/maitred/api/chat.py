"""Route of chat completions: `POST /v1/chat/completions`."""

from functools import partial

from maitred.api.chat_format import ChatFormatter
from maitred.api.exchange import HttpExchange
from maitred.api.priority_headers import apply_priority_headers
from maitred.api.routes import Route
from maitred.api.streaming import send_response
from maitred.core.answer import Conversation, InferenceRequest, InferenceService
from maitred.core.tenancy import Scope
from maitred.text.generation_defaults import DEFAULTED
from maitred.wire.openai.decode import decode_chat
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.openai.responses import ChatChunk, ChatCompletion
from maitred.wire.openai.rules import requested_features
from maitred.wire.openai.sampling import to_sampling_params, unset_fields
from maitred.wire.openai.structured import to_constraint
from maitred.wire.openai.tools import to_tool_rules
from maitred.wire.openai.written import request_fields


class ChatRoutes:
    """Routes of chat completions in OpenAI's API.

    Args:
        answering: The system behind the API.
        strict: Refuse unknown fields.
        heartbeat_s: Longest silence on a stream.
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
            )
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Answers a conversation, whole or as a stream."""
        request = decode_chat(exchange.body, strict=self._strict)
        inference_request = apply_priority_headers(
            to_inference_request(request), exchange.header, retries=exchange.retries
        )
        async with self._service.generate(inference_request, exchange.context) as answer:
            await send_response(
                exchange,
                answer,
                ChatFormatter(request, exchange.id_for("chatcmpl")),
                choices=request.choices,
                streams=request.streams,
                heartbeat_s=self._heartbeat_s,
            )


def to_inference_request(request: ChatRequest) -> InferenceRequest:
    """Makes the inference request of a chat request."""
    return InferenceRequest(
        model=request.model,
        prompts=[Conversation(request.conversation(), template_arguments=request.template_arguments())],
        sampling=to_sampling_params(request, max_tokens=0, seed=0),
        unset_fields=unset_fields(request, DEFAULTED),
        max_tokens=request.token_limit,
        seed=request.seed,
        priority=request.requested_priority,
        stops=request.stops,
        session=request.prompt_cache_key or None,
        user=request.user or None,
        max_tokens_param=request.token_limit_param,
        prompt_param="messages",
        whole=not request.streams,
        needs=requested_features(request),
        tools=partial(to_tool_rules, request),
        to_openai=partial(request_fields, request),
        constraint=partial(to_constraint, request),
    )
