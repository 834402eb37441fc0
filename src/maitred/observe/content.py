"""Prompts and responses as span attributes, for traces that include content (`traces.content`)."""

from collections.abc import Sequence
from typing import Any

import msgspec

from maitred.core.inference import Conversation, InferenceRequest, Prompt, TextDelta

MAX_CHARACTERS = 100_000
"""Most characters of a prompt, or of a response: collectors reject large spans."""


class TextRecorder:
    """Recorder of the text of a response as it comes. Implements `maitred.core.context.DeltaListener`."""

    def __init__(self) -> None:
        self.texts: dict[int, list[str]] = {}
        """Parts of the text by choice."""
        self.finish_reasons: dict[int, str] = {}
        self._characters_left = MAX_CHARACTERS

    def on_delta(self, parts: Sequence[TextDelta]) -> None:
        """Records more text and finish reasons."""
        for part in parts:
            if part.text and self._characters_left > 0:
                self.texts.setdefault(part.index, []).append(part.text[: self._characters_left])
                self._characters_left -= len(part.text)
            if part.finish is not None:
                self.finish_reasons[part.index] = str(part.finish)


def content_attributes(request: InferenceRequest | None, recorder: TextRecorder) -> dict[str, str]:
    """Makes the attributes for prompts and responses by OpenTelemetry's conventions for generative AI: in JSON."""
    if request is None:
        return {}
    inputs = [message for prompt in request.prompts for message in _messages(prompt)]
    answers = [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "".join(recorder.texts.get(index, ()))}],
            "finish_reason": recorder.finish_reasons.get(index, "error"),
        }
        for index in sorted({*recorder.texts, *recorder.finish_reasons})
    ]
    return {
        "gen_ai.input.messages": _json(inputs),
        **({"gen_ai.output.messages": _json(answers)} if answers else {}),
    }


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, Conversation):
        return [{"role": message.get("role", "user"), "parts": _parts(message)} for message in prompt.messages]
    text = prompt if isinstance(prompt, str) else f"{len(prompt):,} tokens"
    return [{"role": "user", "parts": [_text(text)]}]


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Converts the content of a message; parts that are not text are passed on as its API has them."""
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = [_text(part["text"]) if part.get("type") == "text" else part for part in content or ()]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        fields = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
        parts.append({"type": "tool_call", **fields})
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text[:MAX_CHARACTERS]}


def _json(messages: list[dict[str, Any]]) -> str:
    return msgspec.json.encode(messages).decode()
