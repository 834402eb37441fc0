"""Tokenised request: the prompts in the tokens of the model that will serve it, and the tokens that they leave."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from maitred.app.request.output import OutputProcessor
from maitred.core.errors import InvalidRequest, Unsupported
from maitred.core.inference import Conversation, InferenceRequest, Prompt
from maitred.core.replica import ModelCard
from maitred.core.tools import ToolRules
from maitred.routing.catalog import ServedModel
from maitred.text.answer_format import AnswerFormat
from maitred.text.answer_reader import AnswerParser
from maitred.text.tokenizer import NO_MARKS, Tokenizer


class TokenizedRequest(Struct, frozen=True):
    """Request for an own model, tokenised and checked.

    Attributes:
        model: Who is to serve it.
        card: What is known of that model.
        request: What the caller asked.
        prompts: In tokens; at least one.
        available_tokens: For each prompt the most tokens that a choice may have.
        rules: Which tools may be called; None: there are none.
    """

    model: ServedModel
    card: ModelCard
    request: InferenceRequest
    prompts: Sequence[list[int]]
    available_tokens: Sequence[int]
    rules: ToolRules | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, self.prompts))

    @property
    def choice_count(self) -> int:
        """Answers to all prompts together."""
        return len(self.prompts) * self.request.sampling.n

    def output_processors(self) -> list[OutputProcessor]:
        """Makes the output processor of each answer, in the order of the answers.

        Only answers to conversations are parsed: what continues a text is text.
        """
        model, request, processors = self.model, self.request, []
        for sent, prompt in zip(request.prompts, self.prompts, strict=True):
            for _ in range(request.sampling.n):
                reader = None
                if isinstance(sent, Conversation):
                    reader = answer_reader(model.answer_format, model.tokenizer, prompt, self.rules)
                marks = NO_MARKS if reader is None else model.answer_format.marks.bytes_of
                ends = self.card.eos_token_ids
                processors.append(
                    OutputProcessor(model.tokenizer, prompt, request, ends=ends, marks=marks, reader=reader)
                )
        return processors


def answer_reader(
    answers: AnswerFormat, tokenizer: Tokenizer, prompt: Sequence[int], rules: ToolRules | None
) -> AnswerParser | None:
    """Makes the parser of answers to a prompt; None: they are nothing but text."""
    calls = None if rules is None else answers.call_parser({tool.name for tool in rules.callable})
    reasoning = answers.reasoning_parser(inside=answers.opens_thought(tokenizer, prompt))
    if calls is None and reasoning is None:
        return None
    return AnswerParser(reasoning, calls, answers.marks)


_INLINE_CHARACTERS = 2_048
"""More text than this is tokenised in a thread. At about half a megabyte per second it would take more than 4 ms, and
nobody else's tokens would move meanwhile; handing it over takes a tenth of a millisecond."""

_MARKUP_CHARACTERS = 32
"""What a chat template commonly writes around a message."""

NO_TOOLS = (
    "The model {name!r} knows no tools: its chat template has no place for them. Remove tools, or name another model."
)


class HasTokenizer(Protocol):
    """A model whose tokenizer is here."""

    @property
    def name(self) -> str:
        """The name that requests use."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model, with its chat template."""
        ...


class NamedTokenizer(NamedTuple):
    """A tokenizer under the name of the model whose it is."""

    name: str
    tokenizer: Tokenizer


def text_characters(prompt: Prompt) -> int:
    """Returns about how much text there is to read, and never more than there is."""
    if isinstance(prompt, str):
        return len(prompt)
    characters = 0
    if isinstance(prompt, Conversation):
        for message in prompt.messages:
            characters += len(message["content"])
    return characters


def _takes_long(prompts: Sequence[Prompt]) -> bool:
    """Whether reading these would hold up everybody else.

    A conversation is more than its text: a template writes something around each message, even an empty one, and may
    write out tool calls of any length.
    """
    characters = 0
    for prompt in prompts:
        characters += text_characters(prompt)
        if isinstance(prompt, Conversation):
            if prompt.tools or prompt.template_arguments:
                return True
            for message in prompt.messages:
                if message.get("tool_calls"):
                    return True
                characters += _MARKUP_CHARACTERS
    return characters > _INLINE_CHARACTERS


async def tokens_of(
    model: HasTokenizer, prompts: Sequence[Prompt], *, add_special_tokens: bool | None = None
) -> list[list[int]]:
    """The prompts as token ids.

    Args:
        model: Whose tokenizer and chat template to use.
        prompts: In any of their forms.
        add_special_tokens: Whether the text gets the model's begin-of-text token. By default plain text does; a chat
            template writes its own.

    Raises:
        InvalidRequest: The model has no chat template, or it cannot render these messages.
    """
    if not _takes_long(prompts):
        return [_encode(model, prompt, add_special_tokens) for prompt in prompts]
    wanted = True

    def encode_all() -> list[list[int]]:
        # A thread cannot be stopped, but it can look whether anybody waits for it still.
        return [_encode(model, prompt, add_special_tokens) for prompt in prompts if wanted]

    try:
        return await asyncio.to_thread(encode_all)
    finally:
        wanted = False


def _encode(model: HasTokenizer, prompt: Prompt, add_special_tokens: bool | None) -> list[int]:
    match prompt:
        case list():
            return prompt
        case Conversation():
            template = model.tokenizer.chat_template
            if template is None:
                raise InvalidRequest(
                    f"The model {model.name!r} has no chat template. Use /v1/completions with a prompt.", param="model"
                )
            if prompt.tools and not template.knows_tools:
                raise Unsupported(NO_TOOLS.format(name=model.name), param="tools")
            text = template.render(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                tools=prompt.tools or None,
                arguments=prompt.template_arguments,
            )
            return model.tokenizer.encode(text, add_special_tokens=add_special_tokens is True)
        case str():
            return model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False)
