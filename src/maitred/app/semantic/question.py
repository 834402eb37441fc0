"""Question of a request: its last user turn, which may be said in other words while all else must be equal."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from maitred.app.request.tokenized import TokenizedRequest
from maitred.app.request.upstream_request import PreparedRequest
from maitred.cache.answer_key import answer_digest, engine_conversation, upstream_request
from maitred.core.inference import Conversation
from maitred.text.question_guards import skip_reason
from maitred.text.wording import Wording

_TURNS = frozenset({"user", "assistant"})


class UserQuestion(Struct, frozen=True, kw_only=True):
    """Question of a request whose answer may be that of a similar one.

    Attributes:
        model: Name of the model.
        text: What the user wrote last.
        wording: Its words.
        partition: Digest of all that must be equal: what stands before it, tools, format, parameters, what computes the
            answer, and who shares it.
        scope: Model and who shares its answers, as a JSON array; each scope is certified for itself.
    """

    model: str
    text: str
    wording: Wording
    partition: bytes
    scope: str


def make_question(prepared: PreparedRequest, parts: Sequence[bytes | str], scope: Sequence[str]) -> UserQuestion | None:
    """Returns the question of a request; None: its answer can only be its own.

    Args:
        prepared: The request for one model.
        parts: What else is in the key of its answer: model, what computes it, epoch, namespace, who shares it, and what
            the prompt says of the time.
        scope: Model, and who shares its answers.
    """
    request = prepared.request
    conversation = request.prompts[0]
    if not isinstance(conversation, Conversation) or prepared.choice_count != 1 or conversation.continue_final_message:
        return None
    messages = conversation.messages if isinstance(prepared, TokenizedRequest) else prepared.fields.get("messages")
    if not messages or (text := _text_of(messages[-1])) is None:
        return None
    wording = Wording.of(text)
    in_conversation = any(message.get("role") in _TURNS for message in messages[:-1])
    if skip_reason(wording, in_conversation=in_conversation) is not None:
        return None
    others = [*messages[:-1], {**messages[-1], "content": None}]
    try:
        if isinstance(prepared, TokenizedRequest):
            asked = engine_conversation(request, replace(conversation, messages=others), prepared.rules)
        else:
            asked = upstream_request(request, {**prepared.fields, "messages": others}, None)
        partition = answer_digest([*parts, asked])
    except (ValueError, OverflowError, TypeError):
        return None  # a number or a character that has no place in the digest
    return UserQuestion(
        model=scope[0], text=text, wording=wording, partition=partition, scope=msgspec.json.encode(scope).decode()
    )


def _text_of(message: Mapping[str, Any]) -> str | None:
    """Returns the text of a user's message; None: it is another message, or has more than text."""
    if message.get("role") != "user":
        return None
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
    ]
    return "\n".join(texts) if texts and len(texts) == len(content) else None
