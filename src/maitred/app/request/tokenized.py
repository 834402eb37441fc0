"""Tokenised request: prompts as token ids, and the output tokens that still fit into the context window."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from msgspec import Struct
from msgspec.structs import replace

from maitred.api.fair_thread_pool import FairThreadPool
from maitred.app.request.output import OutputProcessor
from maitred.app.request.prompt_scores import PromptScoreReader, prompt_top
from maitred.core.errors import InvalidRequest, ReplicaLost, Unsupported
from maitred.core.inference import AnswerPrefix, Conversation, InferenceRequest, Prompt, TruncationSide
from maitred.core.replica import ModelCard
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.core.tools import ToolRules
from maitred.routing.catalog import ServedModel
from maitred.text.answer_format import PLAIN_ANSWERS, AnswerFormat
from maitred.text.answer_reader import AnswerParser
from maitred.text.tokenizer import NO_MARKS, Tokenizer, truncate_tokens


class TokenizedRequest(Struct, frozen=True):
    """Tokenised and checked request for a model of this gateway.

    Attributes:
        model: The model.
        card: Model card.
        request: The request after defaults, tools and grammar were applied.
        prompts: Token ids of each prompt; at least one prompt.
        prompt_tokens: Number of tokens of all prompts together.
        choice_count: Number of choices of all prompts together.
        available_tokens: Most output tokens of a choice, for each prompt.
        rules: Tools that may be called; None: no tools.
    """

    model: ServedModel
    card: ModelCard
    request: InferenceRequest
    prompts: Sequence[list[int]]
    prompt_tokens: int
    choice_count: int
    available_tokens: Sequence[int]
    rules: ToolRules | None = None

    def prefix_tokens(self, prefix: AnswerPrefix) -> tuple[list[int], int]:
        """Returns the beginning of the answer, which another model has written, as this model would have written it.

        Returns:
            Its token ids, and the number of those that are reasoning.

        Raises:
            ReplicaLost: The model cannot continue it: its answers have no place for reasoning, or its vocabulary has no
                tokens for the text.
        """
        model, is_chat = self.model, isinstance(self.request.prompts[0], Conversation)
        answers = model.answer_format if is_chat else PLAIN_ANSWERS
        tokens = answers.prefix_tokens(model.tokenizer, self.prompts[0], prefix.thought, prefix.text)
        if tokens is None:
            raise ReplicaLost
        return tokens

    def output_processors(self, given: Sequence[int] = ()) -> list[OutputProcessor]:
        """Makes the output processor of each answer, in the order of the answers.

        Only answers to conversations are parsed; a completion is plain text.

        Args:
            given: Token ids of the beginning of the only answer; empty: a new answer.
        """
        model, request, processors = self.model, self.request, []
        if given:
            min_tokens = max(0, request.sampling.min_tokens - len(given))
            request = replace(request, sampling=replace(request.sampling, min_tokens=min_tokens))
        scored = request.echo or request.sampling.prompt_logprobs is not None
        scored = scored and prompt_top(request) is not None
        for source_prompt, prompt in zip(request.prompts, self.prompts, strict=True):
            prompt_scores = PromptScoreReader(model.tokenizer, prompt, request) if scored else None
            for _ in range(request.sampling.n):
                parser = None
                if isinstance(source_prompt, Conversation):
                    parser = make_answer_parser(
                        model.answer_format,
                        model.tokenizer,
                        prompt,
                        self.rules,
                        prefix=request.prefix if given else None,
                        begun=begun_answer(source_prompt) if source_prompt.continue_final_message else "",
                    )
                special_token_text = NO_MARKS if parser is None else model.answer_format.marks.bytes_of
                eos_token_ids = self.card.eos_token_ids
                processors.append(
                    OutputProcessor(
                        model.tokenizer,
                        [*prompt, *given] if given else prompt,
                        request,
                        eos_token_ids=eos_token_ids,
                        special_token_text=special_token_text,
                        parser=parser,
                        prompt_scores=prompt_scores,
                    )
                )
        if given:
            processors[0].prompt_tokens = len(self.prompts[0])
        return processors


def begun_answer(conversation: Conversation) -> str:
    """Returns the text of the message that the model continues; empty: the model writes a new one."""
    return conversation.messages[-1]["content"] or "" if conversation.continue_final_message else ""


def make_answer_parser(
    answers: AnswerFormat,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    rules: ToolRules | None,
    *,
    prefix: AnswerPrefix | None = None,
    begun: str = "",
) -> AnswerParser | None:
    """Makes the parser of answers to a prompt, or of what follows the prefix; None: the answers are plain text.

    Args:
        answers: Format of the answers.
        tokenizer: Tokenizer of the model.
        prompt: The prompt.
        rules: Tools that may be called; None: no tools.
        prefix: Beginning of the answer by another model; None: there is none.
        begun: Text of the answer at the end of the prompt.
    """
    if rules is None and answers.reasoning is None:
        return None
    calls = None if rules is None else answers.call_parser({tool.name for tool in rules.callable})
    reasoning, opened = None, answers.opens_thought(tokenizer, prompt, begun)
    if (prefix is None or not prefix.text) and (opened or not begun.strip()):
        reasoning = answers.reasoning_parser(
            inside=opened or prefix is not None, begun=prefix is not None or bool(begun.strip())
        )
    if calls is None and reasoning is None:
        return None
    return AnswerParser(reasoning, calls, answers.marks, thought=prefix.thought if prefix else "", opened=opened)


_MAX_INLINE_CHARACTERS = 2_048
"""Longer text is tokenised in a thread: at 0.5 MB/s it would block the event loop for more than 4 ms; a thread hop
takes 0.1 ms."""

_TEMPLATE_CHARACTERS_PER_MESSAGE = 32
"""Typical number of characters that a chat template adds to a message."""

NO_TOOLS = (
    "The model {name!r} knows no tools: its chat template has no place for them. Remove tools, or name another model."
)


class TokenizerSource(Protocol):
    """A model name with its tokenizer."""

    @property
    def name(self) -> str:
        """Model name, for error messages."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model, with its chat template."""
        ...


class NamedTokenizer(NamedTuple):
    """A tokenizer with the name of its model. Implements `TokenizerSource`."""

    name: str
    tokenizer: Tokenizer


class PromptTruncation(NamedTuple):
    """Limit to which longer prompts are cut."""

    max_tokens: int
    side: TruncationSide


def count_characters(prompt: Prompt) -> int:
    """Returns a lower bound of the number of characters of a prompt."""
    if isinstance(prompt, str):
        return len(prompt)
    characters = 0
    if isinstance(prompt, Conversation):
        for message in prompt.messages:
            characters += len(message["content"] or "")
    return characters


def _needs_thread(prompts: Sequence[Prompt]) -> bool:
    """Whether reading these would hold up everybody else.

    A conversation is more than its text: a template writes something around each message, even an empty one, and may
    write out tool calls of any length.
    """
    characters = 0
    for prompt in prompts:
        characters += count_characters(prompt)
        if isinstance(prompt, Conversation):
            if prompt.tools or prompt.template_arguments or prompt.chat_template is not None:
                return True
            for message in prompt.messages:
                if message.get("tool_calls"):
                    return True
                characters += _TEMPLATE_CHARACTERS_PER_MESSAGE
    return characters > _MAX_INLINE_CHARACTERS


_thread_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, FairThreadPool] = WeakKeyDictionary()
"""Threads for long prompts; each process has one event loop, and each test one of its own."""
_MAX_THREADS = 4


_ARGUMENT_FIELDS = frozenset({"enable_thinking", "reasoning_effort"})
"""Fields of a request that set the arguments of the same names."""


def unread_arguments(model: ServedModel, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the fields of a request that set arguments which the model's chat template does not read."""
    template = model.tokenizer.chat_template
    unread = () if template is None else template.unread_arguments(names)
    return tuple(name if name in _ARGUMENT_FIELDS else f"chat_template_kwargs.{name}" for name in unread)


async def tokenize_prompts(
    model: TokenizerSource,
    prompts: Sequence[Prompt],
    *,
    add_special_tokens: bool | None = None,
    truncation: PromptTruncation | None = None,
    principal: Principal = ANONYMOUS,
) -> list[list[int]]:
    """Returns the prompts as token ids; long ones are read in threads, at which callers take turns.

    Args:
        model: Whose tokenizer and chat template to use.
        prompts: In any of their forms.
        add_special_tokens: Whether the text gets the model's begin-of-text token. By default plain text does; a chat
            template writes its own.
        truncation: Limit to which longer prompts are cut; None: nothing is cut.
        principal: The caller.

    Raises:
        InvalidRequest: The model has no chat template, or it cannot render these messages.
    """
    if not _needs_thread(prompts):
        return [_encode(model, prompt, add_special_tokens, truncation, principal) for prompt in prompts]
    is_awaited = True
    loop = asyncio.get_running_loop()
    if (threads := _thread_pools.get(loop)) is None:
        threads = _thread_pools[loop] = FairThreadPool(min(os.cpu_count() or 1, _MAX_THREADS), "tokenizer")

    def encode_all() -> list[list[int]]:
        # A thread cannot be cancelled, so it checks whether the result is still awaited.
        return [_encode(model, prompt, add_special_tokens, truncation, principal) for prompt in prompts if is_awaited]

    try:
        return await threads.run(principal, sum(map(count_characters, prompts)), encode_all)
    finally:
        is_awaited = False


def _encode(
    model: TokenizerSource,
    prompt: Prompt,
    add_special_tokens: bool | None,
    truncation: PromptTruncation | None,
    principal: Principal,
) -> list[int]:
    match prompt:
        case str() if truncation is not None:
            return model.tokenizer.encode_truncated(
                prompt, *truncation, add_special_tokens=add_special_tokens is not False
            )
        case str():
            return model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False)
        case Conversation():
            tokenizer, source = model.tokenizer, prompt.chat_template
            template = tokenizer.chat_template if source is None else tokenizer.request_template(source)
            if template is None:
                raise InvalidRequest(
                    f"The model {model.name!r} has no chat template. Send a text: as prompt to /v1/completions, or as "
                    "input to /v1/embeddings.",
                    param="model",
                )
            if prompt.tools and not template.knows_tools:
                raise Unsupported(NO_TOOLS.format(name=model.name), param="tools")
            tokens = tokenizer.encode_conversation(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                tools=prompt.tools or None,
                arguments=prompt.template_arguments,
                continue_final_message=prompt.continue_final_message,
                template=template,
                add_special_tokens=add_special_tokens is True,
                organisation=principal.tenants[-1],
            )
        case list():
            tokens = prompt
    return tokens if truncation is None else truncate_tokens(tokens, *truncation)
