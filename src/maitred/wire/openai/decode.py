"""Decodes request bodies to structs. Whatever the bytes are, the result keeps the rules, or it is InvalidRequest."""

from typing import TypeVar

import msgspec

from maitred.wire.openai import rules
from maitred.wire.openai.faults import DECODE_ERRORS, describe_fault
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

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def decode_chat(body: bytes, *, strict: bool) -> ChatRequest:
    """Decodes the body of a chat completion.

    Args:
        body: The bytes of the body.
        strict: Reject unknown fields. Costs a second decoding.

    Raises:
        InvalidRequest: The body is malformed, mistyped, out of range or asks for an unsupported feature; `param` says
            where.
    """
    request = _decode(_chat_decoder, body, strict)
    rules.check_chat(request)
    return request


def decode_completion(body: bytes, *, strict: bool) -> CompletionRequest:
    """Decodes the body of a text completion; as `decode_chat`."""
    request = _decode(_completion_decoder, body, strict)
    rules.check_completion(request)
    return request


def decode_embedding(body: bytes, *, strict: bool) -> EmbeddingRequest:
    """Decodes the body of a request for embeddings; as `decode_chat`."""
    request = _decode(_embedding_decoder, body, strict)
    rules.check_embedding(request)
    return request


def decode_tokenize(body: bytes, *, strict: bool) -> TokenizeRequest:
    """Decodes the body of a request to tokenise; as `decode_chat`."""
    request = _decode(_tokenize_decoder, body, strict)
    rules.check_tokenize(request)
    return request


def decode_detokenize(body: bytes, *, strict: bool) -> DetokenizeRequest:
    """Decodes the body of a request to detokenise; as `decode_chat`."""
    request = _decode(_detokenize_decoder, body, strict)
    rules.check_detokenize(request)
    return request


def _decode(decoder: msgspec.json.Decoder[R], body: bytes, strict: bool) -> R:
    try:
        request = decoder.decode(body)
        if isinstance(request, GenerationRequest):
            # A body that is nested too deeply for this is rejected, too.
            vars(request)["sent"] = msgspec.to_builtins(request)
        if strict:
            _check_known_fields(msgspec.json.decode(body), type(request))
    except DECODE_ERRORS as error:
        raise describe_fault(error) from error
    return request


def _check_known_fields(fields: dict[str, object], kind: type[msgspec.Struct]) -> None:
    rules.check_known(fields, kind)
    rules.check_known(fields.get("stream_options"), StreamOptions, "stream_options.")
    messages = fields.get("messages")
    for position, message in enumerate(messages if isinstance(messages, list) else ()):
        rules.check_known(message, Message, f"messages[{position}].")
