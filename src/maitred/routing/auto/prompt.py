"""What a person asks in a request, as far as it is looked at to choose a model."""

from typing import Any

from maitred.core.answer import Conversation, Prompt

HEAD_CHARACTERS = 1_500
TAIL_CHARACTERS = 500
"""Of a longer text its beginning and its end: there stands what is asked, and looking stays well under a
millisecond."""


def prompt_text(prompt: Prompt) -> str | None:
    """The text of a prompt, or of the last thing that a person said in a conversation; shortened.

    None: there is none that could be read, such as in token ids, or where only an image was sent.
    """
    match prompt:
        case str():
            text = prompt
        case Conversation():
            text = _last_message(prompt.messages)
        case _:
            return None
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        text = f"{text[:HEAD_CHARACTERS]}\n{text[-TAIL_CHARACTERS:]}"
    return text if text.strip() else None


def _last_message(messages: list[dict[str, Any]]) -> str:
    content = next((each.get("content") for each in reversed(messages) if each.get("role") == "user"), None)
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
