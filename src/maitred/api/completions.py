"""Route `POST /v1/completions`: continues one or several prompts."""

import time
from collections.abc import Sequence
from functools import partial

from msgspec import UNSET, UnsetType

from maitred.api.exchange import HttpExchange
from maitred.api.headers import apply_priority_headers
from maitred.api.routes import Route
from maitred.api.streaming import CollectedChoice, send_response
from maitred.core.inference import InferenceRequest, TextDelta, TokenScore
from maitred.core.request import Usage
from maitred.core.service import InferenceService
from maitred.core.tenancy import Scope
from maitred.text.generation_defaults import DEFAULTED
from maitred.wire.openai.decode import decode_completion, requested_features
from maitred.wire.openai.requests import CompletionRequest
from maitred.wire.openai.responses import (
    CONTINUED,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    UsageBody,
    encode,
    to_finish_reason,
    to_stop_reason,
)
from maitred.wire.openai.sampling import CONSTRAINT_FIELDS, to_constraint, to_sampling_params, unset_fields
from maitred.wire.openai.written import request_fields
from maitred.wire.sse import EventTemplates, encode_event


class CompletionRoutes:
    """Routes of text completions in OpenAI's API.

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
        """Returns the one route of text completions."""
        return [
            Route(
                "POST",
                "/v1/completions",
                self.create,
                "Continue texts, at once or as a stream of events.",
                reads=CompletionRequest,
                returns=Completion,
                streams=Completion,
                needs=Scope.INFERENCE,
                idempotent=True,
            )
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Continues the prompts, whole or as a stream."""
        if exchange.large_body is None:
            request = decode_completion(exchange.body, strict=self._strict)
        else:
            request = await exchange.large_body.decode(decode_completion, strict=self._strict)
        inference_request = apply_priority_headers(
            _to_inference_request(request), exchange.header, retries=exchange.retries
        )
        choices = len(inference_request.prompts) * request.choices
        async with self._service.generate(inference_request, exchange.context) as answer:
            await send_response(
                exchange,
                answer,
                CompletionFormatter(request, exchange.id_for("cmpl")),
                choices=choices,
                streams=request.streams,
                heartbeat_s=self._heartbeat_s,
            )


class CompletionFormatter:
    """Writes one answer in the format of text completions.

    Args:
        request: The request that is answered.
        answer_id: The id of the answer.
    """

    def __init__(self, request: CompletionRequest, answer_id: str) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = request.model
        self._include_usage = request.include_usage
        self._templates = EventTemplates()

    def start(self) -> bytes:
        """Returns no events, because text completions have no roles."""
        return b""

    def events(self, parts: Sequence[TextDelta]) -> bytes:
        """Returns one event per delta; the last event of a choice gives the finish reason."""
        event, full = self._templates.encode, self._text
        if len(parts) == 1 and (part := parts[0]).plain:
            return event(part.index, part.text, full)
        return b"".join(
            [event(part.index, part.text, full) if part.plain else self._encode_part(part) for part in parts]
        )

    def end(self, usage: Usage) -> bytes:
        """Returns the usage, if the request asked for it, in a chunk without choices."""
        return encode_event(encode(self._completion([], UsageBody.of(usage)))) if self._include_usage else b""

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Returns the answer as one JSON object."""
        entries = [
            CompletionChoice(
                index=index,
                text="".join(choice.text),
                logprobs=_logprobs(choice.scores),
                finish_reason=to_finish_reason(choice.finish),
                stop_reason=to_stop_reason(choice.finish),
            )
            for index, choice in enumerate(choices)
        ]
        return encode(self._completion(entries, UsageBody.of(usage)))

    def _text(self, index: int, text: str) -> bytes:
        return self._encode_part(TextDelta(index, text))

    def _encode_part(self, part: TextDelta) -> bytes:
        usage = None if self._include_usage else UNSET
        return encode_event(encode(self._completion([self._chunk(part)], usage, part)))

    def _chunk(self, part: TextDelta) -> CompletionChoice:
        return CompletionChoice(
            index=part.index,
            text=part.text,
            logprobs=_logprobs(part.scores),
            finish_reason=None if part.finish is None else to_finish_reason(part.finish),
            stop_reason=UNSET if part.finish is None else to_stop_reason(part.finish),
        )

    def _completion(
        self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None, part: TextDelta | None = None
    ) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            maitred=CONTINUED if part is not None and part.continued else UNSET,
        )


def _to_inference_request(request: CompletionRequest) -> InferenceRequest:
    return InferenceRequest(
        model=request.model,
        prompts=request.prompts(),
        sampling=to_sampling_params(request, max_tokens=0, seed=0),
        unset_fields=unset_fields(request, DEFAULTED),
        max_tokens=request.token_limit,
        seed=request.seed,
        priority=request.requested_priority,
        stops=request.stops,
        echo=request.echo is True,
        user=request.user or None,
        max_tokens_param=request.token_limit_param,
        whole=not request.streams,
        needs=requested_features(request),
        to_openai=partial(request_fields, request),
        constraint=None if CONSTRAINT_FIELDS.isdisjoint(request.sent) else partial(to_constraint, request),
    )


def _logprobs(scores: list[TokenScore] | None) -> CompletionLogprobs | None:
    if scores is None:
        return None
    return CompletionLogprobs(
        tokens=[score.chosen.text for score in scores],
        token_logprobs=[score.chosen.logprob for score in scores],
        top_logprobs=[{other.text: other.logprob for other in score.top} for score in scores],
        text_offset=[score.offset for score in scores],
    )
