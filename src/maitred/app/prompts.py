"""From a prompt in the caller's terms to the tokens that the model reads."""

import asyncio

from maitred.core.answer import Conversation, Prompt
from maitred.core.errors import InvalidRequest
from maitred.routing.catalog import ServedModel

_INLINE_CHARACTERS = 2_048
"""Longer texts are tokenised in a thread. At about half a megabyte per second these would take more than 4 ms, and
nobody else's tokens would move meanwhile; handing a text over takes a tenth of a millisecond."""


async def tokens_of(model: ServedModel, prompt: Prompt, *, add_special_tokens: bool | None = None) -> list[int]:
    """The prompt as token ids.

    Args:
        model: Whose tokenizer and chat template to use.
        prompt: In any of its forms.
        add_special_tokens: Whether the text gets the model's begin-of-text token. By default plain text does; a chat
            template writes its own.

    Raises:
        InvalidRequest: The model has no chat template, or it cannot render these messages.
    """
    match prompt:
        case list():
            return prompt
        case Conversation():
            template = model.tokenizer.chat_template
            if template is None:
                raise InvalidRequest(
                    f"The model {model.name!r} has no chat template. Use /v1/completions with a prompt.", param="model"
                )
            text = template.render(prompt.messages, add_generation_prompt=prompt.add_generation_prompt)
            return await _encode(model, text, add_special_tokens is True)
        case str():
            return await _encode(model, prompt, add_special_tokens is not False)


async def _encode(model: ServedModel, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= _INLINE_CHARACTERS:
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
