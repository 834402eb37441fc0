"""Request bodies to structs. Whatever the bytes are, the result is a struct that keeps the rules, or InvalidRequest."""

from typing import TypeVar

import msgspec

from maitred.wire.openai import rules
from maitred.wire.openai.faults import UNREADABLE, fault_of
from maitred.wire.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    Message,
    StreamOptions,
    TokenizeRequest,
)

R = TypeVar("R", ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_embedding = msgspec.json.Decoder(EmbeddingRequest)
_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def decode_chat(body: bytes, *, strict: bool) -> ChatRequest:
    """Reads the body of a chat completion.

    Args:
        body: As it came.
        strict: Refuse fields that nobody knows. Costs a second decoding.

    Raises:
        InvalidRequest: Malformed, mistyped, out of range or asking for what is not built yet; `param` says where.
    """
    request = _decoded(_chat, body, strict)
    rules.check_chat(request)
    return request


def decode_completion(body: bytes, *, strict: bool) -> CompletionRequest:
    """Reads the body of a text completion; as `decode_chat`."""
    request = _decoded(_completion, body, strict)
    rules.check_completion(request)
    return request


def decode_embedding(body: bytes, *, strict: bool) -> EmbeddingRequest:
    """Reads the body of a request for embeddings; as `decode_chat`."""
    request = _decoded(_embedding, body, strict)
    rules.check_embedding(request)
    return request


def decode_tokenize(body: bytes, *, strict: bool) -> TokenizeRequest:
    """Reads the body of a tokenisation; as `decode_chat`."""
    request = _decoded(_tokenize, body, strict)
    rules.check_tokenize(request)
    return request


def decode_detokenize(body: bytes, *, strict: bool) -> DetokenizeRequest:
    """Reads the body of a detokenisation; as `decode_chat`."""
    request = _decoded(_detokenize, body, strict)
    rules.check_detokenize(request)
    return request


def _decoded(decoder: msgspec.json.Decoder[R], body: bytes, strict: bool) -> R:
    try:
        request = decoder.decode(body)
        if isinstance(request, GenerationRequest):
            # What is nested too deeply for that is a fault of the request, too.
            vars(request)["sent"] = msgspec.to_builtins(request)
        if strict:
            _refuse_unknown(msgspec.json.decode(body), type(request))
    except UNREADABLE as error:
        raise fault_of(error) from error
    return request


def _refuse_unknown(fields: dict[str, object], kind: type[msgspec.Struct]) -> None:
    rules.check_known(fields, kind)
    rules.check_known(fields.get("stream_options"), StreamOptions, "stream_options.")
    messages = fields.get("messages")
    for position, message in enumerate(messages if isinstance(messages, list) else ()):
        rules.check_known(message, Message, f"messages[{position}].")
