"""Prompt text by which a model is chosen: the last user message of a request, shortened."""

from typing import Any

from maitred.core.inference import Conversation, Prompt

HEAD_CHARACTERS = 1_500
TAIL_CHARACTERS = 500
"""Characters that are kept of a longer text's end, beside `HEAD_CHARACTERS` of its beginning.

The question stands at one of the two, and scoring stays well under a millisecond.
"""


def prompt_text(prompt: Prompt) -> str | None:
    """Returns the text of a prompt, or of the last user message in a conversation; shortened.

    None: there is no text that could be read, such as in token ids, or where only an image was sent.
    """
    match prompt:
        case str():
            text = prompt
        case Conversation():
            text = _last_user_text(prompt.messages)
        case _:
            return None
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        text = f"{text[:HEAD_CHARACTERS]}\n{text[-TAIL_CHARACTERS:]}"
    return text if text.strip() else None


def _last_user_text(messages: list[dict[str, Any]]) -> str:
    content = next((message.get("content") for message in reversed(messages) if message.get("role") == "user"), None)
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
