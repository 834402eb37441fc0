"""Prompt text that selects a model: the shortened last user message of a request."""

from typing import Any

from maitred.core.inference import Conversation, Prompt

HEAD_CHARACTERS = 1_500
TAIL_CHARACTERS = 500
"""Number of characters kept from the end of a longer text, in addition to `HEAD_CHARACTERS`.

The question is usually at the beginning or at the end, and the bound keeps scoring well under a millisecond.
"""


def prompt_text(prompt: Prompt) -> str | None:
    """Returns the shortened text of a prompt, or of the last user message of a conversation.

    None: The result is None if there is no readable text, such as for token ids or for a message with only an image.
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
