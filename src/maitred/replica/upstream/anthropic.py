"""Anthropic's Messages API: encodes requests, with `maitred.wire.anthropic`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest, Unsupported
from maitred.core.text_replica import TextRequest
from maitred.replica.upstream.dialects import ANTHROPIC_DIALECT
from maitred.replica.upstream.request_body import split_fields, unread_thought, without_continuation_fields
from maitred.wire.anthropic.fields import OPERATOR_FIELDS, WITHHELD_FIELDS
from maitred.wire.anthropic.outbound import adapt_history, begins_without_thought, to_messages
from maitred.wire.anthropic.requests import MessagesRequest, unwrap_server_blocks, wrap_server_blocks
from maitred.wire.openai.fields import MESSAGES_THINKING, refuse, unsupported_members
from maitred.wire.openai.requests import ChatRequest, Message

DEFAULT_MAX_TOKENS = 4096
"""Value of `max_tokens` if neither the request nor `parameters` sets it; the API requires one."""


def encode_messages_body(
    request: TextRequest, model: str, parameters: Mapping[str, Any], *, continues_answers: bool = False
) -> tuple[bytes, list[str]]:
    """Encodes the body of a Messages request; see `maitred.replica.upstream.request_body.encode_body`.

    Args:
        request: The request.
        model: Name of the model at the server.
        parameters: Default fields of the body.
        continues_answers: Whether the server continues a last message of the assistant.
    """
    if not request.chat:
        raise InvalidRequest("This model answers conversations only. Use /v1/chat/completions.", param="model")
    if request.given and not continues_answers:
        raise Unsupported("The server that runs this model cannot go on with an answer that another one has begun.")
    if request.fields.get("continue_final_message"):
        # A last message of the assistant is continued here in any case.
        request = without_continuation_fields(request)
    passed, ignored = split_fields(request, ANTHROPIC_DIALECT.allowed_fields, {})
    members = unsupported_members(passed)
    if members.refused:
        raise refuse(members.refused[0], "is not known to the server that runs this model")
    if MESSAGES_THINKING in request.fields:
        passed["thinking"] = request.fields[MESSAGES_THINKING]
    chat = msgspec.convert({"model": model, **passed}, ChatRequest)
    max_tokens = request.max_tokens or parameters.get("max_tokens", DEFAULT_MAX_TOKENS)
    if request.given:
        begun = Message(role="assistant", content=request.given)
        chat = msgspec.structs.replace(chat, messages=[*chat.messages, begun], thinking=None)
    messages_request = to_messages(chat, model=model, max_tokens=max_tokens)
    body = {**parameters, **unwrap_server_blocks(msgspec.to_builtins(messages_request))}
    if "thinking" in body and (
        request.given or not _may_think(messages_request, body["thinking"], _requested_tokens(request))
    ):
        del body["thinking"]
    ignored += [*request.left_out, *(name for name in members.ignored if name != "messages.content_blocks")]
    if (thought := unread_thought(passed["messages"], ("thinking_blocks",))) is not None:
        ignored.append(f"messages.{thought}")  # only signed thoughts are accepted
    return msgspec.json.encode(body), ignored


def encode_native_body(
    request: TextRequest, model: str, parameters: Mapping[str, Any], *, continues_answers: bool = False
) -> tuple[bytes, list[str]]:
    """Encodes the body of a request that came in the words of Messages: what the gateway decides is laid over it.

    Args:
        request: The request, with `native`.
        model: Name of the model at the server.
        parameters: Default fields of the body.
        continues_answers: Whether the server continues a last message of the assistant.
    """
    assert request.native is not None
    if request.given and not continues_answers:
        raise Unsupported("The server that runs this model cannot go on with an answer that another one has begun.")
    sent = request.native.fields
    body = {**parameters, **{name: value for name, value in sent.items() if name not in WITHHELD_FIELDS}}
    body["messages"] = adapt_history(sent["messages"])
    body |= {"model": model, "max_tokens": request.max_tokens or sent["max_tokens"], "stream": True}
    if "thinking" in body:
        messages_request = msgspec.convert(wrap_server_blocks(body), MessagesRequest)
        if "thinking" not in sent:
            messages_request = msgspec.structs.replace(messages_request, thinking=None)
        if request.given or not _may_think(messages_request, body["thinking"], _requested_tokens(request)):
            del body["thinking"]
    if request.given:
        body["messages"] = [*body["messages"], {"role": "assistant", "content": request.given}]
    return msgspec.json.encode(body), [name for name in sent if name in OPERATOR_FIELDS and sent[name] is not None]


def encode_count_body(sent: Mapping[str, Any], model: str) -> bytes:
    """Encodes the body of a request for the number of tokens of a prompt, as the client wrote it."""
    body = {name: value for name, value in sent.items() if name not in WITHHELD_FIELDS}
    return msgspec.json.encode({**body, "messages": adapt_history(sent["messages"]), "model": model})


def parse_count(body: bytes) -> Mapping[str, Any] | None:
    """Parses the number of tokens that a server has counted; None: the body is something else."""
    try:
        count = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    match count:
        case {"input_tokens": int()}:
            return {str(name): value for name, value in count.items()}
    return None


def _requested_tokens(request: TextRequest) -> int | None:
    """Returns the output tokens that the caller asked for; None: not stated."""
    asked: int | None = request.fields.get("max_completion_tokens") or request.fields.get("max_tokens")
    return asked


def _may_think(request: MessagesRequest, thinking: Any, asked_tokens: int | None) -> bool:  # noqa: ANN401 - any JSON
    """Returns whether the server would accept a request with this `thinking`.

    Where the client did not keep the thoughts of its conversation, the model answers without: the server refuses a turn
    that has begun without a thought. Nor does it think where the granted tokens do not suffice. The operator's own
    `thinking` also gives way to a forced tool call.

    Args:
        request: The request.
        thinking: Its `thinking`, or that of the configuration.
        asked_tokens: Output tokens that the caller asked for; None: not stated.
    """
    if not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "adaptive"):
        return True
    if thinking["type"] == "enabled" and begins_without_thought(request.messages):
        return False
    is_own = request.thinking is not None
    budget_tokens = thinking.get("budget_tokens")
    if isinstance(budget_tokens, int) and budget_tokens >= request.max_tokens:
        # The server tells a caller who asked for too little; nobody else did so.
        return is_own and asked_tokens is not None and budget_tokens >= asked_tokens
    return is_own or request.tool_choice is None or request.tool_choice.type in ("auto", "none")
