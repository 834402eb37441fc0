"""From a prompt in the caller's terms to the tokens that the model reads, and whether they fit."""

import asyncio

from maitred.core.answer import Ask, Conversation, Prompt
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.ports import ModelCard
from maitred.routing.catalog import ServedModel

_INLINE_CHARACTERS = 16_384
"""Up to here tokenising takes about as long as handing it to a thread (some milliseconds); beyond, it would hold up
everybody else's tokens."""


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


def check_fits(card: ModelCard, prompt: list[int], ask: Ask) -> int:
    """How many tokens may be generated for this prompt.

    Raises:
        ContextLengthExceeded: Prompt and answer are longer than the model's window.
        InvalidRequest: The prompt is empty, or not made of this model's tokens.
    """
    if not prompt:
        raise InvalidRequest("The prompt has no tokens. Give the model at least one.", param=ask.prompt_param)
    if max(prompt) >= card.vocab_size or min(prompt) < 0:
        raise InvalidRequest(f"Token ids run from 0 to {card.vocab_size - 1}.", param=ask.prompt_param)
    # A KV cache smaller than the context window is the tighter of the two.
    window = min(card.context_tokens, card.kv_capacity_tokens)
    left = window - len(prompt)
    if left < 1:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt):,} tokens, but prompt and answer together may have {window:,}. "
            f"Shorten the prompt to at most {window - 1:,} tokens.",
            param=ask.prompt_param,
        )
    if ask.max_tokens is None:
        return left
    if ask.max_tokens > left:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt):,} tokens and {ask.max_tokens_param} asks for {ask.max_tokens:,} more, but "
            f"together they may have {window:,}. Lower {ask.max_tokens_param} to at most {left:,}, or shorten the "
            "prompt.",
            param=ask.max_tokens_param,
        )
    return ask.max_tokens
