"""Responses to OpenAI clients, field by field, in OpenAI's order.

A field that OpenAI always sends is always sent here, as null if it has no value; a field that OpenAI sends only in some
cases has the default `UNSET`, which omits it. All structs accept only keyword arguments, because `object` stands
between `id` and `created` and positions would be easy to confuse. The structs are trees without cycles, so the garbage
collector skips them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from maitred.core.inference import ChunkMetadata, PromptEntries, PromptScores, TokenScore
from maitred.core.request import FinishReason, Usage

Finish = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]
StopReason = str | int
"""What ended a choice that OpenAI's finish reason cannot express: ``deadline``, a stop string or the id of a stop
token; the name of the field is vLLM's."""
Role = Literal["assistant"]
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields of a message for the model's reasoning.

The first is DeepSeek's, which most clients read; the other is that of newer versions of vLLM.
"""
TEXT_FIELDS = frozenset({*REASONING_FIELDS, "refusal"})
"""Fields of a message that are texts of the model beside its content."""
THOUGHT_FIELDS = (*REASONING_FIELDS, "thinking_blocks")
"""All fields of a message that hold the model's reasoning."""


_FINISH_REASONS: Mapping[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
}


def to_finish_reason(reason: FinishReason) -> Finish:
    """Converts a finish reason to OpenAI's value for it."""
    return _FINISH_REASONS.get(reason, "length")


def to_stop_reason(reason: FinishReason, stop: str | int | None) -> StopReason | UnsetType:
    """Returns what ended a choice, where OpenAI's finish reason does not express it."""
    if reason is FinishReason.DEADLINE:
        return "deadline"
    return UNSET if stop is None else stop


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Breakdown of the prompt's tokens by source."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Breakdown of the answer's tokens by purpose."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of a request, as billed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Breakdown of the answer's tokens, omitted if there are no reasoning tokens."""
    estimated: bool | UnsetType = UNSET
    """True if the counts are estimates, because the server reported none; not OpenAI's field."""

    @classmethod
    def of(cls, usage: Usage) -> "UsageBody":
        """Builds OpenAI's usage body."""
        details = CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens) if usage.reasoning_tokens else UNSET
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
            completion_tokens_details=details,
            estimated=usage.estimated or UNSET,
        )


def usage_so_far(usage: Usage, *, opens: bool = False) -> UsageBody:
    """Builds the usage in a chunk before the end; the chunk that opens a choice has no output yet."""
    return UsageBody.of(replace(usage, completion_tokens=0, reasoning_tokens=0) if opens else usage)


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A candidate token and its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None
    """Bytes of the token, because `token` cannot show a part of a character."""


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The chosen token, and the most probable ones in its place."""

    token: str
    logprob: float | None
    """None: the server gave none."""
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log-probabilities of a chat choice."""

    content: list[ChatLogprob] | None
    refusal: list[ChatLogprob] | None = None

    @classmethod
    def of(cls, scores: Sequence[TokenScore]) -> "ChatLogprobs":
        """Builds the log-probabilities of these tokens."""
        return cls(
            content=[
                ChatLogprob(
                    token=score.chosen.text,
                    logprob=score.chosen.logprob,
                    bytes=list(score.chosen.raw),
                    top_logprobs=[
                        TopLogprob(token=other.text, logprob=other.logprob, bytes=list(other.raw))
                        for other in score.top
                    ],
                )
                for score in scores
            ]
        )


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer of one choice."""

    role: Role = "assistant"
    content: str | None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    function_call: dict[str, Any] | UnsetType = UNSET
    """Function call for requests with `functions`, instead of `tool_calls`."""
    reasoning_content: str | UnsetType = UNSET
    """Reasoning of the model before its answer, in either of two common field names.

    Neither name is OpenAI's.
    """
    reasoning: str | UnsetType = UNSET
    thinking_blocks: list[dict[str, Any]] | UnsetType = UNSET
    """Signed blocks of the reasoning, as Anthropic's API has them; LiteLLM's field name.

    The next turn of a conversation with tools needs them in the message.
    """


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One choice of a whole chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    """Token ids of the choice, if requested; vLLM's field, as are those of the prompt."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A whole chat answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Creation time in seconds since the Unix epoch."""
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt, if requested."""
    prompt_logprobs: PromptEntries | UnsetType = UNSET
    """Log-probabilities of the prompt, which all choices share, omitted unless the client asked for them."""


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Addition of a chunk to a message: first the role, then text, finally nothing."""

    role: Role | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    function_call: dict[str, Any] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    thinking_blocks: list[dict[str, Any]] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A chunk's addition to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    """Token ids since the last chunk of the choice, if requested."""


class Marks(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Additional fields of this gateway in a chunk; OpenAI does not have them."""

    continued: bool
    """Whether another server continues the text at this chunk, because the previous server failed."""


CONTINUED = Marks(continued=True)


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    """Usage of the request, omitted unless the client asked for it.

    If the client asked, it is null in every chunk except the last, which has no choices. With
    `continuous_usage_stats` every chunk has the usage so far, of all choices together.
    """
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt, if requested; in the first chunk of each choice."""
    maitred: Marks | UnsetType = UNSET
    """Additional fields of this gateway, omitted if there are none."""


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log-probabilities of a text choice, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Start position of each token in the text of the choice, in characters."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One choice of a text answer, or a chunk's addition to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    """Token ids of the choice, or of the chunk, if requested."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the choice's prompt, if requested; in the first chunk of each choice."""
    prompt_logprobs: PromptEntries | UnsetType = UNSET
    """Log-probabilities of the prompt, omitted unless the client asked for them."""


class Completion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A whole text answer, or one event of its stream: OpenAI gives both the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    """Usage as in `ChatChunk`; always present in a whole answer."""
    system_fingerprint: str | UnsetType = UNSET
    maitred: Marks | UnsetType = UNSET
    """Additional fields of this gateway, as in `ChatChunk`."""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | UnsetType = UNSET
    """Context window in tokens; OpenAI lacks this field, but clients of open servers read it."""
    ready: bool | UnsetType = UNSET
    """Whether a request could run now; OpenAI does not have this field."""
    embedding_dimensions: int | UnsetType = UNSET
    """Dimensions of its vectors; left out: it generates text. OpenAI does not have this field."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """List of the models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


class EmbeddingEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str
    """Vector as numbers, or as base64 of little-endian fp32 values if the client asked for it."""
    index: int


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Billed token counts of a request for embeddings, which generates no tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Answer of `POST /v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


class Tokenized(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Answer of `POST /detokenize`."""

    prompt: str


class LimitDetail(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Limit that refused a request; OpenAI does not have this struct."""

    scope: str
    """Owner of the limit, such as ``tenant:acme``."""
    limit: str
    """Kind of the limit, such as ``tokens_per_minute``."""
    value: int
    """Capacity in requests, tokens, or nano-dollars."""
    used: int
    remaining: int
    reset_s: float | None
    """Time until the whole limit is free again, or null if waiting never frees it."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Description of an error: `message` for a person, the rest for a program."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    limit: LimitDetail | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Body of any error, alone or as the last event of a stream."""

    error: ErrorDetail


Body = (
    ChatCompletion
    | ChatChunk
    | Completion
    | EmbeddingList
    | ModelEntry
    | ModelList
    | Tokenized
    | Detokenized
    | ErrorBody
)

_encoder = msgspec.json.Encoder()


def encode(body: Body | Mapping[str, Any]) -> bytes:
    """Encodes a body, or its fields, as JSON in UTF-8."""
    return _encoder.encode(body)


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Returns OpenAI's usage with whatever else the server counted."""
    fields: dict[str, Any] = msgspec.to_builtins(UsageBody.of(usage))
    for name, value in (usage.details or {}).items():
        decided = fields.get(name)
        if decided is None:
            fields[name] = value
        elif isinstance(decided, dict) and isinstance(value, dict):
            # Of these details, cached and reasoning tokens are billed, so they stand as the gateway has them.
            fields[name] = {**decided, **value, **{key: decided[key] for key in _BILLED_DETAILS if key in decided}}
    return fields


def prompt_logprobs(scores: PromptScores | None) -> PromptEntries | UnsetType:
    """Returns the log-probabilities of a prompt, if the client asked for them."""
    return UNSET if scores is None or scores.logprobs is None else scores.logprobs


def have_members(scores: Iterable[TokenScore] | None) -> bool:
    """Returns whether a server has said more of one of these tokens than its log-probability."""
    return any(score.chosen.members or any(other.members for other in score.top) for score in scores or ())


def score_entries(scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
    """Returns the log-probabilities of these tokens as chats have them, with whatever else their server says."""
    entries: list[dict[str, Any]] = msgspec.to_builtins(ChatLogprobs.of(scores))["content"]
    for entry, score in zip(entries, scores, strict=True):
        tops = [{**(other.members or {}), **top} for top, other in zip(entry["top_logprobs"], score.top, strict=True)]
        entry |= {**(score.chosen.members or {}), **entry, "top_logprobs": tops}
    return entries


def without_tokens(metadata: ChunkMetadata) -> ChunkMetadata:
    """Returns the members around a delta that also hold for the next one: not those about single tokens, as ids."""
    chunk, choice = (
        {
            name: value
            for name, value in members.items()
            if name != "logprobs" and not (isinstance(value, list) and value and isinstance(value[0], int))
        }
        for members in (metadata.chunk, metadata.choice)
    )
    return ChunkMetadata(chunk, choice)


_BILLED_DETAILS = ("cached_tokens", "reasoning_tokens")


def add_metadata(fields: dict[str, Any], metadata: Sequence[ChunkMetadata], usage: Usage | None) -> dict[str, Any]:
    """Returns the fields of a body with the members that the server sent around its choices and in its usage.

    What the gateway decides stays as it is.

    Args:
        fields: Fields of an answer or a chunk.
        metadata: Members around each of its choices.
        usage: Usage to write; None: it stays as it is.
    """
    for choice, members in zip(fields["choices"], metadata, strict=False):
        for name, value in members.choice.items():
            if name == "logprobs":
                # Those of a refusal stand beside those of the text; others are what only the client may read.
                decided = choice[name] or ({"content": None} if "refusal" in value else {})
                choice[name] = {**decided, **value}
            else:
                choice.setdefault(name, value)
    if usage is not None and usage.details:
        fields["usage"] = usage_fields(usage)
    chunk = {name: value for members in metadata for name, value in members.chunk.items()}
    return {**chunk, **fields}
