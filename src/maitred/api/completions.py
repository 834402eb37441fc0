"""Route `POST /v1/completions`: continues one or several prompts."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType, to_builtins

from maitred.api.exchange import HttpExchange
from maitred.api.headers import apply_request_headers
from maitred.api.routes import Route
from maitred.api.streaming import CollectedChoice, send_response
from maitred.core.context import RequestContext
from maitred.core.inference import (
    TOKEN_ID_PREFIX,
    ChunkMetadata,
    InferenceRequest,
    PromptScores,
    TextDelta,
    TokenLogprob,
    TokenScore,
)
from maitred.core.request import Usage
from maitred.core.service import InferenceService
from maitred.core.tenancy import Scope
from maitred.text.generation_defaults import DEFAULTED
from maitred.wire.cache_control import to_cache_control
from maitred.wire.openai.decode import decode_completion, unsupported_by_engine
from maitred.wire.openai.requests import CompletionRequest
from maitred.wire.openai.responses import (
    CONTINUED,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
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
    to_constraint,
    to_sampling_params,
    token_fields,
    unset_fields,
)
from maitred.wire.openai.written import merge_deltas, request_fields
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
                least_output=1,
            )
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Continues the prompts, whole or as a stream."""
        request = await exchange.decode(decode_completion, strict=self._strict)
        inference_request = apply_request_headers(
            _to_inference_request(request), exchange.header, retries=exchange.retries
        )
        choices = len(inference_request.prompts) * request.choices
        async with self._service.generate(inference_request, exchange.context) as answer:
            await send_response(
                exchange,
                answer,
                CompletionFormatter(request, exchange.id_for("cmpl"), exchange.context),
                choices=choices,
                streams=request.streams,
                heartbeat_s=self._heartbeat_s,
            )


class CompletionFormatter:
    """Writes one answer in the format of text completions.

    Args:
        request: The request that is answered.
        answer_id: The id of the answer.
        context: The request context, for the model that answers.
    """

    def __init__(self, request: CompletionRequest, answer_id: str, context: RequestContext) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._context = context
        self._include_usage = request.include_usage
        self._include_continuous_usage = self._include_usage and request.include_continuous_usage
        self._choices = request.choices
        self._opened: set[int] = set()
        """Choices whose first chunk was written."""
        self._templates = EventTemplates()
        self._metadata: dict[int, ChunkMetadata] = {}
        """Members that the server sent around the deltas of each choice."""

    def start(self) -> bytes:
        """Returns no events, because text completions have no roles."""
        return b""

    def events(self, parts: Sequence[TextDelta]) -> bytes:
        """Returns one event per delta; the last event of a choice gives the finish reason."""
        event, full = self._templates.encode, self._text
        if self._include_continuous_usage:
            return b"".join(map(self._encode_part, parts))
        if len(parts) == 1 and (part := parts[0]).plain:
            return event(part.index, part.text, full)
        return b"".join(
            [event(part.index, part.text, full) if part.plain else self._encode_part(part) for part in parts]
        )

    def end(self, usage: Usage) -> bytes:
        """Returns the usage, if the request asked for it, in a chunk without choices."""
        if not self._include_usage:
            return b""
        completion = self._completion([], UsageBody.of(usage))
        if not self._metadata and usage.details is None:
            return encode_event(encode(completion))
        return encode_event(encode(add_metadata(to_builtins(completion), [*self._metadata.values()], usage)))

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Returns the answer as one JSON object."""
        entries = [
            CompletionChoice(
                index=index,
                text="".join(choice.text),
                logprobs=_logprobs(choice.scores, choice.prompt_scores),
                finish_reason=to_finish_reason(choice.finish),
                stop_reason=to_stop_reason(choice.finish, choice.stop),
                token_ids=UNSET if choice.token_ids is None else choice.token_ids,
                prompt_token_ids=self._prompt_token_ids(index),
                prompt_logprobs=prompt_logprobs(choice.prompt_scores),
            )
            for index, choice in enumerate(choices)
        ]
        completion = self._completion(entries, UsageBody.of(usage))
        has_more = any(choice.metadata or choice.extras or have_members(choice.scores) for choice in choices)
        if usage.details is None and not has_more:
            return encode(completion)
        metadata = [choice.whole_metadata() for choice in choices]
        for members, choice in zip(metadata, choices, strict=True):
            members.choice.update(merge_deltas(choice.extras))
            _add_entries(members.choice, choice.scores)
        return encode(add_metadata(to_builtins(completion), metadata, usage))

    def _text(self, index: int, text: str) -> bytes:
        return self._encode_part(TextDelta(index, text))

    def _encode_part(self, part: TextDelta) -> bytes:
        if part.continued:  # what the first server said of itself is not true of the next one
            self._metadata.clear()
            self._templates.clear()
        if part.metadata is not None:
            self._metadata[part.index] = part.metadata
            self._templates.pop(part.index, None)
        usage = usage_so_far(self._context.usage) if self._include_continuous_usage else None
        completion = self._completion([self._chunk(part)], usage if self._include_usage else UNSET, part)
        metadata = self._metadata.get(part.index)
        if metadata is None and not part.extra and not have_members(part.scores):
            return encode_event(encode(completion))
        metadata = metadata or ChunkMetadata()
        # A text has no message whose members these could be.
        members = ChunkMetadata(metadata.chunk, {**metadata.choice, **(part.extra or {})})
        _add_entries(members.choice, part.scores)
        if part.metadata is not None:
            self._metadata[part.index] = without_tokens(part.metadata)
        return encode_event(encode(add_metadata(to_builtins(completion), [members], None)))

    def _chunk(self, part: TextDelta) -> CompletionChoice:
        return CompletionChoice(
            index=part.index,
            text=part.text,
            logprobs=_logprobs(part.scores, part.prompt_scores),
            finish_reason=None if part.finish is None else to_finish_reason(part.finish),
            stop_reason=UNSET if part.finish is None else to_stop_reason(part.finish, part.stop),
            token_ids=UNSET if part.token_ids is None else part.token_ids,
            prompt_token_ids=self._opening_token_ids(part.index),
        )

    def _opening_token_ids(self, index: int) -> list[int] | UnsetType:
        """Returns the token ids of the prompt for the first chunk of a choice."""
        if not self._context.prompt_token_ids or index in self._opened:
            return UNSET
        self._opened.add(index)
        return self._prompt_token_ids(index)

    def _prompt_token_ids(self, index: int) -> list[int] | UnsetType:
        prompts = self._context.prompt_token_ids
        return [*prompts[index // self._choices]] if prompts else UNSET

    def _completion(
        self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None, part: TextDelta | None = None
    ) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._context.model,
            choices=choices,
            usage=usage,
            maitred=CONTINUED if part is not None and part.continued else UNSET,
        )


def _to_inference_request(request: CompletionRequest) -> InferenceRequest:
    unsupported = unsupported_by_engine(request)
    return InferenceRequest(
        model=request.model,
        prompts=request.prompts(),
        sampling=to_sampling_params(request, max_tokens=0, seed=0),
        unset_fields=unset_fields(request, DEFAULTED),
        max_tokens=request.token_limit,
        seed=request.seed,
        priority=request.requested_priority,
        stops=request.stops,
        **({} if TOKEN_FIELDS.isdisjoint(request.sent) else token_fields(request)),
        echo=request.echo is True,
        cache=to_cache_control(request.cache),
        user=request.user or None,
        max_tokens_param=request.token_limit_param,
        whole=not request.streams,
        needs=unsupported.refused,
        hints=unsupported.ignored,
        to_openai=partial(request_fields, request),
        constraint=None if CONSTRAINT_FIELDS.isdisjoint(request.sent) else partial(to_constraint, request),
    )


def _logprobs(scores: list[TokenScore] | None, prompt: PromptScores | None) -> CompletionLogprobs | None:
    if prompt is not None and prompt.echoed is not None:
        scores = [*prompt.echoed, *(scores or ())]
    if scores is None:
        return None
    return CompletionLogprobs(
        tokens=[_token_key(score.chosen) for score in scores],
        token_logprobs=[score.chosen.logprob for score in scores],
        top_logprobs=[_top_logprobs(score) for score in scores],
        text_offset=[score.offset for score in scores],
    )


def _add_entries(members: dict[str, Any], scores: list[TokenScore] | None) -> None:
    """Adds the log-probabilities in the form of chats, if their server says more of a token than completions tell."""
    if scores is not None and have_members(scores):
        members["logprobs"] = {"content": score_entries(scores), **members.get("logprobs", {})}


def _top_logprobs(score: TokenScore) -> dict[str, float] | None:
    """Returns the most probable tokens, best first, and the chosen one if it is not among them.

    The result is None for a token without log-probability, as the first of an echoed prompt.
    """
    tops: dict[str, float] = {}
    for token in (*score.top, score.chosen):
        if token.logprob is not None:
            tops.setdefault(_token_key(token), token.logprob)
    return tops or None


def _token_key(token: TokenLogprob) -> str:
    r"""Returns the name of a token in an answer: its text, or ``bytes:\xe2`` for a part of a character, as OpenAI's."""
    if token.text.startswith(TOKEN_ID_PREFIX):
        return token.text
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
    return token.text
