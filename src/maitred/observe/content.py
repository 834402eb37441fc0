"""What was said in a request and its answer, for traces that are to have it (`traces.content`)."""

from collections.abc import Sequence
from typing import Any

import msgspec

from maitred.core.answer import Conversation, InferenceRequest, Prompt, TextDelta

MOST_CHARACTERS = 100_000
"""Of a prompt, or of an answer: collectors refuse large spans."""


class TextRecorder:
    """The text of an answer as it comes. Implements `maitred.core.answer.DeltaListener`."""

    def __init__(self) -> None:
        self.texts: dict[int, list[str]] = {}
        """By choice."""
        self.finishes: dict[int, str] = {}
        self._left = MOST_CHARACTERS

    def on_delta(self, parts: Sequence[TextDelta]) -> None:
        """More of it."""
        for part in parts:
            if part.text and self._left > 0:
                self.texts.setdefault(part.index, []).append(part.text[: self._left])
                self._left -= len(part.text)
            if part.finish is not None:
                self.finishes[part.index] = str(part.finish)


def content_attributes(request: InferenceRequest | None, overhearing: TextRecorder) -> dict[str, str]:
    """Prompts and answers, as OpenTelemetry's conventions for generative AI write them: in JSON."""
    if request is None:
        return {}
    given = [message for prompt in request.prompts for message in _messages(prompt)]
    answers = [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "".join(overhearing.texts.get(index, ()))}],
            "finish_reason": overhearing.finishes.get(index, "error"),
        }
        for index in sorted({*overhearing.texts, *overhearing.finishes})
    ]
    return {
        "gen_ai.input.messages": _json(given),
        **({"gen_ai.output.messages": _json(answers)} if answers else {}),
    }


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, Conversation):
        return [{"role": message.get("role", "user"), "parts": _parts(message)} for message in prompt.messages]
    text = prompt if isinstance(prompt, str) else f"{len(prompt):,} tokens"
    return [{"role": "user", "parts": [_text(text)]}]


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What is not text is passed on as its API has it."""
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = [_text(part["text"]) if part.get("type") == "text" else part for part in content or ()]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        told = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
        parts.append({"type": "tool_call", **told})
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text[:MOST_CHARACTERS]}


def _json(messages: list[dict[str, Any]]) -> str:
    return msgspec.json.encode(messages).decode()
