"""A request as a server of somebody else's will read it: in text, with what it will count for.

Where the model's tokenizer has been put here, tokens are counted with it. Otherwise they are estimated, and the server,
which has one, has the last word: only what cannot fit however it is counted is refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from maitred.app.limits import check_fits, check_sampling
from maitred.app.prompts import Vocabulary, tokens_of
from maitred.app.tooling import with_tools
from maitred.core.answer import Ask, Conversation, Prompt
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.ports import ModelCard
from maitred.routing.catalog import TextModel
from maitred.text.estimate import LearntRatio, estimate, estimate_conversation

_HEAD_CHARACTERS = 512
_SURELY = 0.5
"""So much of an estimate is there however it is counted."""


class Beginning(Sequence[int]):
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


class Sketch(Beginning):
    """Stands for the tokens of a prompt that nobody here can name: as many, and alike where texts begin alike.

    Args:
        head: How the text begins.
        tokens: How many there are.
    """

    def __init__(self, head: str, tokens: int) -> None:
        data = head[:_HEAD_CHARACTERS].encode("utf-8", "surrogatepass")
        super().__init__(memoryview(data + bytes(-len(data) % 4)).cast("I").tolist(), tokens)


@dataclass(frozen=True, slots=True)
class TextReading:
    """What is asked, sized and checked.

    Attributes:
        model: Who is to serve it.
        card: What is known of that model.
        ask: What the caller asked.
        fields: The same in the words of OpenAI's API.
        prompts: What stands for their tokens; at least one.
        rooms: For each prompt the most tokens that a choice may have.
        estimated: Tokens of all prompts by the rule alone, before anything that was learnt; None: they were counted.
    """

    model: TextModel
    card: ModelCard
    ask: Ask
    fields: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    rooms: Sequence[int]
    estimated: float | None

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together."""
        return sum(map(len, self.prompts))

    @property
    def choice_count(self) -> int:
        """Answers to all prompts together."""
        return len(self.prompts) * self.ask.sampling.n


async def read_text(model: TextModel, ask: Ask, max_choices: int) -> TextReading:
    """Sizes a request.

    Raises:
        InvalidRequest: It came through an API that this model cannot be asked in, or asks for too many choices.
        ContextLengthExceeded: It cannot fit the model's window.
        ReplicaUnavailable: Nothing is known of the model yet.
    """
    card = model.card()
    if ask.written is None:
        raise InvalidRequest(
            f"The model {model.name!r} is served by another server, which takes requests of OpenAI's API only. Use "
            "/v1/chat/completions.",
            param="model",
        )
    check_sampling(card, ask, max_choices)
    fields = ask.written()
    tools = fields.get("tools")
    tokens = await _counted(model, ask) if model.tokenizer is not None else None
    if tokens is not None:
        rooms = [check_fits(card, prompt, ask) for prompt in tokens]
        return TextReading(model, card, ask, fields, tokens, rooms, None)
    raw = [_estimated(prompt, tools) for prompt in ask.prompts]
    sketches = [
        Sketch(_head(prompt), _corrected(prompt_tokens, model.prompt_ratio))
        for prompt, prompt_tokens in zip(ask.prompts, raw, strict=True)
    ]
    rooms = [_room(card, len(sketch), ask) for sketch in sketches]
    return TextReading(model, card, ask, fields, sketches, rooms, sum(raw))


async def _counted(model: TextModel, ask: Ask) -> list[list[int]] | None:
    """The prompts in tokens; None where the tokenizer alone does not tell them."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template is None and any(isinstance(prompt, Conversation) for prompt in ask.prompts):
        return None
    try:
        asked = with_tools(ask, None if ask.tools is None else ask.tools())
        return await tokens_of(Vocabulary(model.name, tokenizer), asked.prompts)
    except InvalidRequest:
        # Its own server may know tools of other kinds, or another template; whether it does is for that to say.
        if not ask.needs:
            raise
        return None


def _estimated(prompt: Prompt, tools: object) -> float:
    match prompt:
        case Conversation():
            return estimate_conversation(prompt.messages, tools)
        case str():
            return estimate(prompt)
        case list():
            return float(len(prompt))


def _corrected(estimated: float, ratio: LearntRatio) -> int:
    return max(1, round(estimated * ratio.value))


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


def _room(card: ModelCard, tokens: int, ask: Ask) -> int:
    """The most output tokens, by an estimate that may be wrong either way."""
    window = card.context_tokens
    surely = int(tokens * _SURELY)
    if surely + (ask.max_tokens or 1) > window:
        raise ContextLengthExceeded(
            f"The prompt has about {tokens:,} tokens{_asked(ask)}, but prompt and answer together may have {window:,}. "
            "Shorten the prompt, or ask for a shorter answer.",
            param=ask.prompt_param,
        )
    room = max(1, window - tokens)
    return room if ask.max_tokens is None else ask.max_tokens


def _asked(ask: Ask) -> str:
    return "" if ask.max_tokens is None else f" and {ask.max_tokens_param} asks for {ask.max_tokens:,} more"
