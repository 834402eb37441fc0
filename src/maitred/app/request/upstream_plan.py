"""A request as a server of somebody else's will read it: in text, with what it will count for.

Where the model's tokenizer has been put here, tokens are counted with it. Otherwise they are estimated, and the server,
which has one, has the last word: only what cannot fit however it is counted is refused here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, overload

from msgspec import Struct

from maitred.app.request.tokenized import NamedTokenizer, tokens_of
from maitred.app.request.validation import check_fits, check_sampling, with_tools
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.inference import Conversation, InferenceRequest, Prompt
from maitred.core.replica import ModelCard
from maitred.routing.catalog import TextModel
from maitred.text.estimate import estimate, estimate_conversation

_HEAD_CHARACTERS = 512
_SURELY = 0.5
"""So much of an estimate is there however it is counted."""


class TruncatedPrompt(Sequence[int]):
    """A prompt of which only the beginning can be looked at.

    Args:
        head: What stands there.
        tokens: How many there are in all.
    """

    def __init__(self, head: Sequence[int], tokens: int) -> None:
        self.head = head
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return self.head[place]


class PseudoTokens(TruncatedPrompt):
    """Stands for the tokens of a prompt that nobody here can name: as many, and alike where texts begin alike.

    Args:
        prompt: Its beginning is made into numbers when somebody looks at them: only where a model has several servers
            does it matter which of them has seen the like.
        tokens: How many there are.
    """

    def __init__(self, prompt: Prompt, tokens: int) -> None:
        super().__init__((), tokens)
        self._prompt = prompt

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if not self.head:
            data = _head(self._prompt)[:_HEAD_CHARACTERS].encode("utf-8", "surrogatepass")
            self.head = memoryview(data + bytes(-len(data) % 4)).cast("I").tolist()
        return self.head[place]


class UpstreamRequestPlan(Struct, frozen=True):
    """Request for an upstream server, sized and checked."""

    model: TextModel
    """Who is to serve it."""
    card: ModelCard
    """What is known of that model."""
    request: InferenceRequest
    """What the caller asked."""
    fields: Mapping[str, Any]
    """The same in the words of OpenAI's API."""
    prompts: Sequence[Sequence[int]]
    """What stands for their tokens; at least one."""
    available_tokens: Sequence[int]
    """For each prompt the most tokens that a choice may have."""
    prompt_tokens: int
    """Of all prompts together."""
    choice_count: int
    """Answers to all prompts together."""
    estimated: float | None
    """Tokens of all prompts by the rule alone, before anything that was learnt; None: they were counted."""


async def plan_upstream(model: TextModel, request: InferenceRequest, max_choices: int) -> UpstreamRequestPlan:
    """Sizes a request, by its tokens where the model's tokenizer is here and can tell them.

    Raises:
        InvalidRequest: It came through an API that this model cannot be asked in, or asks for too many choices.
        ContextLengthExceeded: It cannot fit the model's window.
        ReplicaUnavailable: Nothing is known of the model yet.
    """
    if model.tokenizer is not None:
        card, fields = _check(model, request, max_choices)
        if (tokens := await _tokenize(model, request)) is not None:
            available_tokens = [check_fits(card, prompt, request) for prompt in tokens]
            counted = sum(map(len, tokens))
            return UpstreamRequestPlan(
                model, card, request, fields, tokens, available_tokens, counted, len(tokens) * request.sampling.n, None
            )
    return estimate_text(model, request, max_choices)


def estimate_text(model: TextModel, request: InferenceRequest, max_choices: int) -> UpstreamRequestPlan:
    """Sizes a request by the looks of its text; raises as `plan_upstream` does."""
    card, fields = _check(model, request, max_choices)
    tools = fields.get("tools")
    ratio = model.prompt_ratio.value
    sketches: list[PseudoTokens] = []
    available_tokens = []
    estimated, prompt_tokens = 0.0, 0
    for prompt in request.prompts:
        raw = _estimate_prompt(prompt, tools)
        corrected = max(1, round(raw * ratio))
        sketches.append(PseudoTokens(prompt, corrected))
        available_tokens.append(_available_tokens(card, corrected, request))
        estimated += raw
        prompt_tokens += corrected
    choices = len(sketches) * request.sampling.n
    return UpstreamRequestPlan(
        model, card, request, fields, sketches, available_tokens, prompt_tokens, choices, estimated
    )


def _check(model: TextModel, request: InferenceRequest, max_choices: int) -> tuple[ModelCard, Mapping[str, Any]]:
    """Checks the request against the model's card, and returns it in the words of the API."""
    card = model.card()
    if request.to_openai is None:
        raise InvalidRequest(
            f"The model {model.name!r} is served by another server, which takes requests of OpenAI's API only. Use "
            "/v1/chat/completions.",
            param="model",
        )
    check_sampling(card, request, max_choices)
    return card, request.to_openai()


async def _tokenize(model: TextModel, request: InferenceRequest) -> list[list[int]] | None:
    """The prompts in tokens; None where the tokenizer alone does not tell them."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template is None and any(isinstance(prompt, Conversation) for prompt in request.prompts):
        return None
    try:
        asked = with_tools(request, None if request.tools is None else request.tools())
        return await tokens_of(NamedTokenizer(model.name, tokenizer), asked.prompts)
    except InvalidRequest:
        # Its own server may know tools of other kinds, or another template; whether it does is for that to say.
        if not request.needs:
            raise
        return None


def _estimate_prompt(prompt: Prompt, tools: object) -> float:
    match prompt:
        case Conversation():
            return estimate_conversation(prompt.messages, tools)
        case str():
            return estimate(prompt)
        case list():
            return float(len(prompt))


def _head(prompt: Prompt) -> str:
    match prompt:
        case Conversation():
            return "".join(
                f"{message['role']}\n{message['content'][:_HEAD_CHARACTERS]}" for message in prompt.messages[:4]
            )
        case str():
            return prompt
        case list():
            return repr(prompt[:_HEAD_CHARACTERS])


def _available_tokens(card: ModelCard, tokens: int, request: InferenceRequest) -> int:
    """The most output tokens, by an estimate that may be wrong either way."""
    window = card.context_tokens
    surely = int(tokens * _SURELY)
    if surely + (request.max_tokens or 1) > window:
        raise ContextLengthExceeded(
            f"The prompt has about {tokens:,} tokens{_max_tokens_sentence(request)}, but prompt and answer together "
            f"may have {window:,}. Shorten the prompt, or ask for a shorter answer.",
            param=request.prompt_param,
        )
    available = max(1, window - tokens)
    return available if request.max_tokens is None else request.max_tokens


def _max_tokens_sentence(request: InferenceRequest) -> str:
    return "" if request.max_tokens is None else f" and {request.max_tokens_param} asks for {request.max_tokens:,} more"
