"""What we encode, against what OpenAI describes."""

import json

import jsonschema
import pytest

from maitred.core.request import Usage
from maitred.wire.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ErrorBody,
    ErrorDetail,
    ModelEntry,
    ModelList,
    TopLogprob,
    UsageBody,
    encode,
)
from tests.support.openai_schemas import validate

USAGE = UsageBody.of(Usage(12, 5, 8))
CHAT_LOGPROBS = ChatLogprobs(
    content=[
        ChatLogprob(
            token="Hé",
            logprob=-0.25,
            bytes=[72, 195, 169],
            top_logprobs=[TopLogprob(token="Hé", logprob=-0.25, bytes=[72, 195, 169])],
        )
    ]
)
TEXT_LOGPROBS = CompletionLogprobs(
    tokens=["a"], token_logprobs=[-1.0], top_logprobs=[{"a": -1.0, "b": -2.0}], text_offset=[0]
)
HEAD = {"created": 1_700_000_000, "model": "tiny"}
ENTRY = ModelEntry(id="tiny", created=1_700_000_000, owned_by="maitred", max_model_len=2048)


def chat_chunk(*choices, **fields):
    return ChatChunk(id="chatcmpl-1", **HEAD, choices=list(choices), **fields)


def text(*choices, **fields):
    return Completion(id="cmpl-1", **HEAD, choices=list(choices), **fields)


def chat(choice, **fields):
    return ChatCompletion(id="chatcmpl-1", **HEAD, choices=[choice], usage=USAGE, **fields)


BODIES = {
    "chat": (
        "CreateChatCompletionResponse",
        chat(ChatChoice(index=0, message=ChatMessage(content="Hi"), finish_reason="stop")),
    ),
    "chat with log-probabilities": (
        "CreateChatCompletionResponse",
        chat(
            ChatChoice(index=0, message=ChatMessage(content="Hi"), logprobs=CHAT_LOGPROBS, finish_reason="length"),
            system_fingerprint="fp",
        ),
    ),
    "chat chunk with the role": (
        "CreateChatCompletionStreamResponse",
        chat_chunk(ChatChunkChoice(index=0, delta=ChatDelta(role="assistant", content=""))),
    ),
    "chat chunk with text": (
        "CreateChatCompletionStreamResponse",
        chat_chunk(ChatChunkChoice(index=1, delta=ChatDelta(content="Hé"), logprobs=CHAT_LOGPROBS)),
    ),
    "last chat chunk of a choice": (
        "CreateChatCompletionStreamResponse",
        chat_chunk(ChatChunkChoice(index=0, delta=ChatDelta(), finish_reason="stop")),
    ),
    "chat chunk with usage": ("CreateChatCompletionStreamResponse", chat_chunk(usage=USAGE)),
    "text": (
        "CreateCompletionResponse",
        text(CompletionChoice(index=0, text="a", finish_reason="stop"), usage=USAGE),
    ),
    "text with log-probabilities": (
        "CreateCompletionResponse",
        text(CompletionChoice(index=0, text="a", logprobs=TEXT_LOGPROBS, finish_reason="length"), usage=USAGE),
    ),
    "last text chunk of a choice": (
        "CreateCompletionResponse",
        text(CompletionChoice(index=0, text="", finish_reason="length")),
    ),
    "text chunk with usage": ("CreateCompletionResponse", text(usage=USAGE)),
    "model": ("Model", ENTRY),
    "models": ("ListModelsResponse", ModelList(data=[ENTRY])),
    "error": (
        "ErrorResponse",
        ErrorBody(error=ErrorDetail(message="No.", type="invalid_request_error", param="n", code="invalid_value")),
    ),
    "error without a field": ("ErrorResponse", ErrorBody(error=ErrorDetail(message="No.", type="server_error"))),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_as_openai_describes(name):
    schema_name, body = BODIES[name]
    validate(schema_name, json.loads(encode(body)))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("chat", "choices", [{"index": 0}]),
        ("chat", "object", "chat.completion.chunk"),
        ("chat with log-probabilities", "usage", {"prompt_tokens": "12"}),
        ("error", "error", {"message": "No."}),
    ],
)
def test_the_schemas_refuse_what_is_wrong(name, field, value):
    schema_name, body = BODIES[name]
    wrong = json.loads(encode(body)) | {field: value}
    with pytest.raises(jsonschema.ValidationError):
        validate(schema_name, wrong)


def test_fields_come_in_openais_order():
    assert encode(BODIES["chat chunk with the role"][1]) == (
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":[{"index":0,'
        b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
    )


def test_usage_is_left_out_null_or_given():
    assert b'"usage"' not in encode(chat_chunk())
    assert encode(chat_chunk(usage=None)).endswith(b'"usage":null}')
    assert json.loads(encode(chat_chunk(usage=USAGE)))["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 5,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0},
    }
