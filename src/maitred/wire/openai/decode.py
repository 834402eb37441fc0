"""Decodes request bodies to structs that follow the rules, or raises InvalidRequest.

Requests with correct types are checked field by field, and the first fault is raised. A message names the field, the
rule and the value, so that a client can correct the request without a manual. Rules that need the model (token ids
within the vocabulary, the context window, the largest `n`) are checked elsewhere.
"""

from collections.abc import Collection, Mapping, Sequence, Sized
from difflib import get_close_matches
from typing import Any, TypeVar, cast

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.flow import HIGHEST_PRIORITY, LOWEST_PRIORITY
from maitred.wire.openai.faults import DECODE_ERRORS, describe_body_fault, format_value
from maitred.wire.openai.fields import (
    EMBEDDING_FIELDS,
    FIELDS,
    MEDIA_PARTS,
    MESSAGE_MEMBERS,
    TOKENIZE_FIELDS,
    RequestField,
    UnsupportedFields,
    media_parts,
    refuse,
    split_unsupported,
    unsupported_fields,
    unsupported_members,
)
from maitred.wire.openai.requests import (
    SERVICE_TIERS,
    CacheFields,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    EmbeddingRequest,
    Message,
    RequestBody,
    StreamOptions,
    TokenizeRequest,
)
from maitred.wire.openai.sampling import CONSTRAINT_FIELDS, MAX_TOP_LOGPROBS, TOOL_FIELDS, WHOLE_VOCABULARY

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_ROLES = frozenset(ROLES) - {"tool"}
"""Roles whose messages have only a text."""
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENS = 1_048_576
"""Largest number of token ids in one list.

This is longer than any context window, and checking every number of a longer list would delay other requests.
"""
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
"""Largest length of a stop string; each text is compared with it, so its length costs time."""
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKENS = 128
MAX_ALLOWED_TOKENS = 65_536
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_TEMPLATE_BYTES = 64 * 1024
"""Largest size of a chat template in a request."""
MAX_ANSWERS = 2048
"""Largest number of choices for all prompts of one completion request together."""
MAX_INPUTS = 2048
"""Largest number of inputs of one embeddings request, as in OpenAI's API."""
ENCODING_FORMATS = ("float", "base64")
TRUNCATION_SIDES = ("left", "right")
MAX_CACHE_S = 2**31
"""Longest time in seconds that is said of an answer in a cache, as in RFC 9111, section 1.2.2."""
MAX_NAMESPACE_CHARACTERS = 64

FieldSchema = dict[str, Any]
"""Keywords of JSON Schema that say which values a field may have."""


class NumberRange(msgspec.Struct, frozen=True):
    """Range of the values that a number may take."""

    low: float
    high: float
    excludes_low: bool = False

    def check(self, field: str, value: float | None) -> None:
        """Raises InvalidRequest if the value lies outside the range; accepts None."""
        if value is None:
            return
        if value < self.low or (self.excludes_low and value == self.low):
            bound = "greater than" if self.excludes_low else "at least"
            raise InvalidRequest(
                f"{field} must be {bound} {format_value(self.low)}; got {format_value(value)}.", param=field
            )
        if value > self.high:
            raise InvalidRequest(
                f"{field} must be at most {format_value(self.high)}; got {format_value(value)}.", param=field
            )

    def schema(self) -> FieldSchema:
        """Returns the range as JSON Schema."""
        return {"exclusiveMinimum" if self.excludes_low else "minimum": self.low, "maximum": self.high}


_RANGES: Mapping[str, NumberRange] = {
    "max_tokens": NumberRange(1, MAX_TOKEN_ID),
    "max_completion_tokens": NumberRange(1, MAX_TOKEN_ID),
    "min_tokens": NumberRange(0, MAX_TOKEN_ID),
    "temperature": NumberRange(0, 2),
    "top_p": NumberRange(0, 1, excludes_low=True),
    "top_k": NumberRange(-1, MAX_TOKEN_ID),
    "min_p": NumberRange(0, 1),
    "repetition_penalty": NumberRange(0.01, 100),
    "presence_penalty": NumberRange(-2, 2),
    "frequency_penalty": NumberRange(-2, 2),
    "seed": NumberRange(-(2**63), 2**63 - 1),
    "n": NumberRange(1, MAX_CHOICES),
    "priority": NumberRange(LOWEST_PRIORITY, HIGHEST_PRIORITY),
    "top_logprobs": NumberRange(WHOLE_VOCABULARY, MAX_TOP_LOGPROBS),
    "prompt_logprobs": NumberRange(WHOLE_VOCABULARY, MAX_TOP_LOGPROBS),
    "truncate_prompt_tokens": NumberRange(-1, MAX_TOKEN_ID),
}
_COMPLETION_RANGES: Mapping[str, NumberRange] = {
    **_RANGES,
    "max_tokens": NumberRange(0, MAX_TOKEN_ID),
    "logprobs": NumberRange(0, MAX_TOP_LOGPROBS),
}
_CACHE_RANGES: Mapping[str, NumberRange] = {
    "ttl": NumberRange(0, MAX_CACHE_S, excludes_low=True),
    "s-maxage": NumberRange(0, MAX_CACHE_S),
}
_CACHE_MEMBERS = CacheFields.__struct_encode_fields__
_DIMENSIONS = NumberRange(1, MAX_TOKEN_ID)
_LOGIT_BIAS = NumberRange(-100, 100)
_TOKEN_ID = NumberRange(0, MAX_TOKEN_ID)

_PLAIN_FIELDS = frozenset(
    {
        *("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "seed", "n", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
        *("stream", "stream_options", "priority", "service_tier", "user", "logprobs", "top_logprobs", "best_of"),
        *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens"),
        *("spaces_between_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
        *("truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "cache"),
    }
)
_PLAIN_CHAT_FIELDS = (_PLAIN_FIELDS - {"best_of"}) | {
    *("messages", "max_completion_tokens", "chat_template_kwargs", "enable_thinking", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "chat_template"),
    *("include_reasoning", "parallel_tool_calls", "prompt_cache_key", "stop_in_reasoning"),
}
"""Fields that every model of our own honours in a chat completion..."""
_PLAIN_COMPLETION_FIELDS = (_PLAIN_FIELDS - {"top_logprobs"}) | {"prompt", "echo"}
"""...and in a text completion."""
CHAT_FIELDS = _PLAIN_CHAT_FIELDS | CONSTRAINT_FIELDS | TOOL_FIELDS
"""Fields that our own engine honours in a chat completion, where the model knows tools..."""
COMPLETION_FIELDS = _PLAIN_COMPLETION_FIELDS | CONSTRAINT_FIELDS
"""...and in a text completion."""


def check_chat(request: ChatRequest) -> None:
    """Raises InvalidRequest for the first rule that a chat request breaks."""
    _check_generation(request, _RANGES)
    check_messages(request.messages)
    check_template_arguments(
        request.chat_template_kwargs,
        enable_thinking=request.enable_thinking,
        reasoning_effort=request.reasoning_effort,
    )
    if request.continue_final_message:
        _check_continuation(request)
    if request.chat_template is not None:
        _check_template(request.chat_template)
    both_limits = request.max_tokens is not None and request.max_completion_tokens is not None
    if both_limits and request.max_tokens != request.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ. Send only one.", param="max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest(
            "top_logprobs needs logprobs to be true. Set it, or remove top_logprobs.", param="top_logprobs"
        )


def check_completion(request: CompletionRequest) -> None:
    """Raises InvalidRequest for the first rule that a completion request breaks."""
    _check_generation(request, _COMPLETION_RANGES)
    check_prompt(request.prompt)
    if (answers := len(request.prompts()) * request.choices) > MAX_ANSWERS:
        raise InvalidRequest(
            f"Prompts times n must be at most {MAX_ANSWERS}; got {answers}. Send several requests.", param="prompt"
        )
    if request.max_tokens == 0 and not request.scores_prompt:
        raise InvalidRequest(
            "max_tokens must be at least 1; got 0. An answer without output needs echo or prompt_logprobs.",
            param="max_tokens",
        )
    if request.best_of is not None and request.best_of != request.choices:
        raise InvalidRequest(
            f"best_of must equal n ({request.choices}); got {format_value(request.best_of)}. Remove it.",
            param="best_of",
        )


def check_embedding(request: EmbeddingRequest) -> None:
    """Raises InvalidRequest for the first rule that a request for embeddings breaks."""
    if not request.model:
        raise InvalidRequest("model must name a model; got an empty string.", param="model")
    if request.input is not None:
        check_prompt(request.input, "input")
    inputs = request.inputs()
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(
            f"input must hold at most {MAX_INPUTS:,} entries; got {len(inputs):,}. Send several requests.",
            param="input",
        )
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("Send either input or messages.", param="input")
    if request.messages is not None:
        check_messages(request.messages)
        check_template_arguments(request.chat_template_kwargs)
    _check_conversation_fields(request)
    _check_truncation(request)
    if "" in inputs:
        path = "input" if isinstance(request.input, str) else f"input[{inputs.index('')}]"
        raise InvalidRequest(f"{path} must not be an empty string. Remove it.", param=path)
    if request.encoding_format is not None and request.encoding_format not in ENCODING_FORMATS:
        raise InvalidRequest(
            f"encoding_format must be one of {', '.join(ENCODING_FORMATS)}; got "
            f"{format_value(request.encoding_format)}.",
            param="encoding_format",
        )
    _DIMENSIONS.check("dimensions", request.dimensions)
    _RANGES["priority"].check("priority", request.priority)


def unsupported_by_engine(request: ChatRequest | CompletionRequest) -> UnsupportedFields:
    """Returns the fields that ask for more than text, and the hints that our own engine leaves out."""
    sent = request.sent
    plain = _PLAIN_CHAT_FIELDS if isinstance(request, ChatRequest) else _PLAIN_COMPLETION_FIELDS
    is_plain = plain.issuperset(sent) and sent.get("stream_options", _WITH_USAGE) == _WITH_USAGE
    for message in sent.get("messages", ()):
        is_plain = is_plain and MESSAGE_MEMBERS.issuperset(message) and message.get("content").__class__ is str
    if is_plain:
        return _NONE_UNSUPPORTED
    fields = unsupported_fields(sent, plain, chat=isinstance(request, ChatRequest))
    members = unsupported_members(sent)
    refused = fields.refused + members.refused + media_parts(sent.get("messages", ()))
    return UnsupportedFields(refused, fields.ignored + members.ignored)


def check_tokenize(request: TokenizeRequest) -> None:
    """Raises InvalidRequest unless the request has exactly one input to tokenise."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    if request.messages is not None:
        check_messages(request.messages)
        if media := media_parts(msgspec.to_builtins(request.messages)):
            raise refuse(media[0], "has no tokens of text")
    check_template_arguments(request.chat_template_kwargs)
    if request.chat_template is not None:
        _check_template(request.chat_template)
    _check_conversation_fields(request)


def check_detokenize(request: DetokenizeRequest) -> None:
    """Raises InvalidRequest if an entry is not a token id."""
    check_token_ids("tokens", request.tokens)


def check_cache(cache: CacheFields, sent: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for the first member of the field `cache` that is unknown or out of range.

    Unknown members are refused at any time: who means `no-store` and misspells it would find the answer kept.

    Args:
        cache: The field.
        sent: The body as it was written.
    """
    for name in sent["cache"]:
        if name not in _CACHE_MEMBERS:
            raise InvalidRequest(
                f"cache.{format_value(name)[1:-1]} must be left out: cache has only the members "
                f"{', '.join(_CACHE_MEMBERS)}.",
                param=f"cache.{name[:128]}",
            )
    _CACHE_RANGES["ttl"].check("cache.ttl", cache.ttl)
    _CACHE_RANGES["s-maxage"].check("cache.s-maxage", cache.s_maxage)
    if cache.namespace is not None and not 0 < len(cache.namespace) <= MAX_NAMESPACE_CHARACTERS:
        raise InvalidRequest(
            f"cache.namespace must have 1 to {MAX_NAMESPACE_CHARACTERS} characters; got {len(cache.namespace)}.",
            param="cache.namespace",
        )


def check_known(fields: object, kind: type[msgspec.Struct], path: str = "", also: Collection[str] = ()) -> None:
    """Raises InvalidRequest for the first field that is neither in the struct nor in `also`."""
    if not isinstance(fields, dict):
        return
    for name in fields:
        if name not in kind.__struct_fields__ and name not in also:
            close = get_close_matches(name[:64], kind.__struct_fields__, n=1)
            remedy = f"Did you mean {path}{close[0]}?" if close else "Remove it."
            raise InvalidRequest(
                f"{path}{format_value(name)[1:-1]} is not a field of this request. {remedy}",
                param=f"{path}{name[:128]}",
            )


def _check_generation(request: ChatRequest | CompletionRequest, ranges: Mapping[str, NumberRange]) -> None:
    if not request.model:
        raise InvalidRequest("model must name a model; got an empty string.", param="model")
    for field in request.sent:
        if field in ranges:
            ranges[field].check(field, getattr(request, field, None))
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest(
            "prompt_logprobs are not sent in streams. Set stream to false, or send echo and logprobs to "
            "/v1/completions.",
            param="prompt_logprobs",
        )
    if request.service_tier is not None and request.service_tier not in SERVICE_TIERS:
        raise InvalidRequest(
            f"service_tier must be one of {', '.join(SERVICE_TIERS)}; got {format_value(request.service_tier)}.",
            param="service_tier",
        )
    if request.stop is not None:
        _check_stops(request.stop)
    if request.stop_token_ids is not None:
        _check_count("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKENS)
        check_token_ids("stop_token_ids", request.stop_token_ids)
    if request.allowed_token_ids is not None or request.bad_words:
        _check_token_masks(request)
    if request.truncate_prompt_tokens is not None or request.truncation_side is not None:
        _check_truncation(request)
    if request.logit_bias is not None:
        _check_count("logit_bias", request.logit_bias, MAX_BIASED_TOKENS)
        for key, bias in request.logit_bias.items():
            _check_bias(key, bias)
    if request.min_tokens is not None and request.token_limit is not None and request.min_tokens > request.token_limit:
        raise InvalidRequest(
            f"min_tokens ({request.min_tokens}) must not exceed {request.token_limit_param} ({request.token_limit}).",
            param="min_tokens",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only for streams. Set stream to true, or remove it.", param="stream_options"
        )


def _check_count(field: str, entries: Sized, most: int) -> None:
    if len(entries) > most:
        raise InvalidRequest(f"{field} must have at most {most} entries; got {len(entries)}.", param=field)


def _check_stops(stop: str | Sequence[str]) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop must hold at most {MAX_STOPS} strings; got {len(stops)}.", param="stop")
    if "" in stops:
        raise InvalidRequest("stop must not be an empty string. Remove it.", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"A stop string must have at most {MAX_STOP_CHARACTERS} characters; got {longest}.", param="stop"
        )


def _check_token_masks(request: ChatRequest | CompletionRequest) -> None:
    allowed, bad_words = request.allowed_token_ids, request.bad_words
    if allowed is not None:
        if not allowed:
            raise InvalidRequest(
                "allowed_token_ids must hold at least one token id. Remove it to allow all.", param="allowed_token_ids"
            )
        _check_count("allowed_token_ids", allowed, MAX_ALLOWED_TOKENS)
        check_token_ids("allowed_token_ids", allowed)
    if bad_words:
        _check_count("bad_words", bad_words, MAX_BAD_WORDS)
        if not all(map(str.strip, bad_words)):
            raise InvalidRequest("bad_words must not hold an empty string. Remove it.", param="bad_words")
        if (longest := max(map(len, bad_words))) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"A word of bad_words must have at most {MAX_BAD_WORD_CHARACTERS} characters; got {longest}.",
                param="bad_words",
            )


def _check_truncation(request: ChatRequest | CompletionRequest | EmbeddingRequest) -> None:
    limit, side = request.truncate_prompt_tokens, request.truncation_side
    if limit is not None:
        _RANGES["truncate_prompt_tokens"].check("truncate_prompt_tokens", limit)
    if side is not None and side not in TRUNCATION_SIDES:
        raise InvalidRequest(
            f"truncation_side must be one of {', '.join(TRUNCATION_SIDES)}; got {format_value(side)}.",
            param="truncation_side",
        )


def _check_continuation(request: ChatRequest | EmbeddingRequest | TokenizeRequest) -> None:
    """Raises InvalidRequest unless the last message can be continued."""
    if request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other. Set add_generation_prompt to false.",
            param="continue_final_message",
        )
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != "assistant" or last.content is None or last.tool_calls or last.function_call:
        raise InvalidRequest(
            "continue_final_message needs a last message of the role assistant, with a content and without calls.",
            param="continue_final_message",
        )


def _check_conversation_fields(request: EmbeddingRequest | TokenizeRequest) -> None:
    """Raises InvalidRequest for fields that say how messages are written, where there are none."""
    if request.continue_final_message:
        _check_continuation(request)
    if request.messages is None:
        for name in _CONVERSATION_FIELDS:
            if getattr(request, name, None):
                raise InvalidRequest(f"{name} is for messages. Remove it, or send messages.", param=name)


def _check_template(template: str) -> None:
    if len(template.encode()) > MAX_TEMPLATE_BYTES:
        raise InvalidRequest(f"chat_template must have at most {MAX_TEMPLATE_BYTES:,} bytes.", param="chat_template")


def _check_bias(key: str, bias: float) -> None:
    # Ten digits are enough for every token id, and int() of a long text is slow.
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
        raise InvalidRequest(f"The keys of logit_bias must be token ids; got {format_value(key)}.", param="logit_bias")
    _LOGIT_BIAS.check(f"logit_bias.{key}", bias)


_NONE_UNSUPPORTED = UnsupportedFields()
_WITH_USAGE = {"include_usage": True}

R = TypeVar("R", ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)


def decode_chat(body: bytes, *, strict: bool) -> ChatRequest:
    """Decodes the body of a chat completion.

    Args:
        body: The bytes of the body.
        strict: Whether unknown fields are rejected.

    Raises:
        InvalidRequest: The body is malformed, mistyped, out of range or asks for an unsupported feature; `param` says
            where.
    """
    request, fields = _decode_fields(ChatRequest, body, strict, FIELDS)
    vars(request)["sent"] = fields
    if request.cache is not None:
        check_cache(request.cache, fields)
    check_chat(request)
    return request


def decode_completion(body: bytes, *, strict: bool) -> CompletionRequest:
    """Decodes the body of a text completion, as `decode_chat` does."""
    request, fields = _decode_fields(CompletionRequest, body, strict, FIELDS)
    vars(request)["sent"] = fields
    if request.cache is not None:
        check_cache(request.cache, fields)
    check_completion(request)
    return request


def decode_embedding(body: bytes, *, strict: bool) -> EmbeddingRequest:
    """Decodes the body of a request for embeddings, as `decode_chat` does."""
    request, fields = _decode_fields(EmbeddingRequest, body, strict, EMBEDDING_FIELDS)
    if request.cache is not None:
        check_cache(request.cache, fields)
    check_embedding(request)
    _check_fields(fields, request, EMBEDDING_FIELDS)
    return request


def decode_tokenize(body: bytes, *, strict: bool) -> TokenizeRequest:
    """Decodes the body of a request to tokenise, as `decode_chat` does."""
    request, fields = _decode_fields(TokenizeRequest, body, strict, TOKENIZE_FIELDS)
    check_tokenize(request)
    _check_fields(fields, request, TOKENIZE_FIELDS)
    return request


def decode_detokenize(body: bytes, *, strict: bool) -> DetokenizeRequest:
    """Decodes the body of a request to detokenise, as `decode_chat` does."""
    request, _ = _decode_fields(DetokenizeRequest, body, strict, {})
    check_detokenize(request)
    return request


def _check_fields(fields: Mapping[str, Any], request: RequestBody, table: Mapping[str, RequestField]) -> None:
    """Notes the hints that the struct does not have; raises Unsupported for other fields that it does not have."""
    unsupported = split_unsupported(fields, frozenset(request.__struct_fields__), table)
    if unsupported.refused:
        raise refuse(unsupported.refused[0], "is not supported by this server yet", table)
    vars(request)["ignored_fields"] = unsupported.ignored


def _decode_fields(
    kind: type[R], body: bytes, strict: bool, table: Mapping[str, RequestField]
) -> tuple[R, dict[str, Any]]:
    """Decodes a body to its struct and to its fields as they were written, without null."""
    try:
        fields = msgspec.json.decode(body)
        request = msgspec.convert(fields, kind)
    except DECODE_ERRORS as error:
        raise describe_body_fault(_error_with_path(kind, body, error), body) from error
    if strict:
        check_known(fields, kind, also=table)
        _check_known_members(fields)
    if None in fields.values():
        fields = {name: value for name, value in fields.items() if value is not None}
    return request, fields


def _error_with_path(kind: type[msgspec.Struct], body: bytes, error: Exception) -> Exception:
    """Returns the error that names the field at fault; of a number without a type, msgspec names no field."""
    try:
        msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as named:
        return named
    return error


def _check_known_members(fields: Mapping[str, Any]) -> None:
    check_known(fields.get("stream_options"), StreamOptions, "stream_options.")
    messages = fields.get("messages")
    for position, message in enumerate(messages if isinstance(messages, list) else ()):
        check_known(message, Message, f"messages[{position}].")


def check_messages(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest for the first message that no model can read."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    for position, message in enumerate(messages):
        if message.content.__class__ is not str or message.role not in _TEXT_ROLES or message.tool_calls:
            _check_message(f"messages[{position}]", message)


def check_prompt(prompt: str | Sequence[str | int | Sequence[int]], path: str = "prompt") -> None:
    """Raises InvalidRequest unless the prompt is one text, several texts, or one or more token lists."""
    if isinstance(prompt, str):
        return
    if not prompt:
        raise InvalidRequest(f"{path} must not be an empty list.", param=path)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise InvalidRequest(f"{path} must hold only texts, only token ids, or only lists of token ids.", param=path)
    if kinds == {int}:
        check_token_ids(path, cast("Sequence[int]", prompt))
    elif kinds == {list}:
        for position, tokens in enumerate(prompt):
            if isinstance(tokens, list):
                if not tokens:
                    raise InvalidRequest(
                        f"{path}[{position}] must hold at least one token id.", param=f"{path}[{position}]"
                    )
                check_token_ids(f"{path}[{position}]", tokens)


def check_token_ids(path: str, tokens: Sequence[int]) -> None:
    """Raises InvalidRequest for the first number that is not a token id, or for too many ids.

    Too many means more ids than any model reads.
    """
    if len(tokens) > MAX_TOKENS:
        raise InvalidRequest(f"{path} must hold at most {MAX_TOKENS:,} token ids; got {len(tokens):,}.", param=path)
    if tokens and (min(tokens) < 0 or max(tokens) > MAX_TOKEN_ID):
        wrong = next(token for token in tokens if not 0 <= token <= MAX_TOKEN_ID)
        raise InvalidRequest(f"{path} must hold token ids; got {format_value(wrong)}.", param=path)


def _check_message(path: str, message: Message) -> None:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{path}.role must be one of {', '.join(ROLES)}; got {format_value(message.role)}.", param=f"{path}.role"
        )
    match message.content:
        case None if message.role == "assistant" and (message.tool_calls or message.function_call or message.refusal):
            pass
        case None:
            raise InvalidRequest(
                f"{path}.content must be a string or a list of text parts; got null.", param=f"{path}.content"
            )
        case []:
            raise InvalidRequest(f"{path}.content must hold at least one part.", param=f"{path}.content")
        case [*parts]:
            for position, part in enumerate(parts):
                _check_part(f"{path}.content[{position}]", part)
    for position, call in enumerate(message.tool_calls or ()):
        if call.function is None and (call.type != "custom" or call.custom is msgspec.UNSET):
            missing = "custom" if call.type == "custom" else "function"
            raise InvalidRequest(
                f"{path}.tool_calls[{position}].{missing} is required.",
                param=f"{path}.tool_calls[{position}].{missing}",
            )
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(
            f"{path}.tool_call_id is required for the role tool: it names the call that this answers.",
            param=f"{path}.tool_call_id",
        )


def _check_part(path: str, part: ContentPart) -> None:
    if part.type != "text" and part.type not in MEDIA_PARTS:
        raise InvalidRequest(
            f"{path} must have one of the types text, {', '.join(sorted(MEDIA_PARTS))}; got {format_value(part.type)}.",
            param=path,
        )
    if getattr(part, part.type) is None:
        raise InvalidRequest(f"{path}.{part.type} is required.", param=f"{path}.{part.type}")


_CONVERSATION_FIELDS = ("chat_template", "chat_template_kwargs")
"""Fields that say how messages are written."""
MAX_ARGUMENTS = 32
MAX_NAME_CHARACTERS = 64
MAX_BYTES = 16 * 1024
"""Largest size in bytes of all arguments as JSON.

A template may write the arguments into the prompt, and it runs before the prompt tokens are counted.
"""
_RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_FIELD = "chat_template_kwargs"


def check_template_arguments(arguments: Mapping[str, Any] | None, **fields: object) -> None:
    """Raises InvalidRequest for the first rule that the arguments break.

    Args:
        arguments: Arguments for the chat template, as they were sent.
        fields: Fields of the request that set arguments of the same names, with their values or None.
    """
    if not arguments:
        return
    if len(arguments) > MAX_ARGUMENTS:
        raise InvalidRequest(f"{_FIELD} must have at most {MAX_ARGUMENTS} entries; got {len(arguments)}.", param=_FIELD)
    for name in arguments:
        if len(name) > MAX_NAME_CHARACTERS or not name.isidentifier():
            raise InvalidRequest(
                f"The names in {_FIELD} must be names of variables, of at most {MAX_NAME_CHARACTERS} characters; got "
                f"{format_value(name)}.",
                param=_FIELD,
            )
        if name in _RESERVED_NAMES:
            raise InvalidRequest(
                f"{_FIELD}.{name} is set by the request itself. Remove it, and send {name} as a field.", param=_FIELD
            )
    if (size := len(msgspec.json.encode(arguments))) > MAX_BYTES:
        raise InvalidRequest(f"{_FIELD} must have at most {MAX_BYTES:,} bytes; got {size:,}.", param=_FIELD)
    for name, value in fields.items():
        effective = arguments.get(name, value)
        if value is not None and (effective != value or type(effective) is not type(value)):
            raise InvalidRequest(f"{name} and {_FIELD}.{name} differ. Send only one.", param=name)


def body_schemas() -> dict[type, dict[str, FieldSchema]]:
    """Returns the rules of single fields, for the description of the API: struct -> field -> JSON Schema."""
    text, token_ids = {"minLength": 1}, _TOKEN_ID.schema()
    stop = {**text, "maxLength": MAX_STOP_CHARACTERS}
    word = {"pattern": r"\S", "maxLength": MAX_BAD_WORD_CHARACTERS}
    tokens = {"minItems": 1, "maxItems": MAX_TOKENS, "items": token_ids}
    prompt = {**tokens, "items": {**tokens, **token_ids}}
    arguments = {"maxProperties": MAX_ARGUMENTS, "propertyNames": {"maxLength": MAX_NAME_CHARACTERS}}
    truncation: dict[str, FieldSchema] = {
        "truncate_prompt_tokens": _RANGES["truncate_prompt_tokens"].schema(),
        "truncation_side": {"enum": [*TRUNCATION_SIDES]},
    }
    common: dict[str, FieldSchema] = {
        **{field: numbers.schema() for field, numbers in _RANGES.items()},
        "model": text,
        "stop": {**stop, "maxItems": MAX_STOPS, "items": stop},
        "stop_token_ids": {"maxItems": MAX_STOP_TOKENS, "items": token_ids},
        "allowed_token_ids": {"minItems": 1, "maxItems": MAX_ALLOWED_TOKENS, "items": token_ids},
        "bad_words": {"maxItems": MAX_BAD_WORDS, "items": word},
        **truncation,
        "logit_bias": {
            "maxProperties": MAX_BIASED_TOKENS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": _LOGIT_BIAS.schema(),
        },
        "service_tier": {"enum": [*SERVICE_TIERS]},
    }
    return {
        ChatRequest: {**common, "messages": {"minItems": 1}, "chat_template_kwargs": arguments},
        CompletionRequest: {
            **common,
            **{field: _COMPLETION_RANGES[field].schema() for field in ("max_tokens", "logprobs")},
            "prompt": prompt,
            "best_of": _RANGES["n"].schema(),
        },
        EmbeddingRequest: {
            "model": text,
            "input": {**text, **prompt, "items": {**text, **tokens, **token_ids}},
            "messages": {"minItems": 1},
            "chat_template_kwargs": arguments,
            **truncation,
            "encoding_format": {"enum": [*ENCODING_FORMATS]},
            "dimensions": _DIMENSIONS.schema(),
            "priority": _RANGES["priority"].schema(),
        },
        TokenizeRequest: {
            "messages": {"minItems": 1},
            "chat_template_kwargs": arguments,
        },
        DetokenizeRequest: {"tokens": {"maxItems": MAX_TOKENS, "items": token_ids}},
        CacheFields: {
            **{member: numbers.schema() for member, numbers in _CACHE_RANGES.items()},
            "namespace": {"minLength": 1, "maxLength": MAX_NAMESPACE_CHARACTERS},
        },
        Message: {"role": {"enum": [*ROLES]}, "content": {"minItems": 1}},
        ContentPart: {"type": {"enum": ["text", *sorted(MEDIA_PARTS)]}},
    }
