"""A request as the model that will serve it reads it: in tokens, with the room that they leave."""

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from maitred.app.request.output import OutputProcessor
from maitred.core.answer import Conversation, InferenceRequest
from maitred.core.ids import new_object_id
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

    def choices(self) -> list[OutputProcessor]:
        """An empty choice for each answer, in their order."""
        return [self._choice(number) for number in range(len(self.prompts)) for _ in range(self.request.sampling.n)]

    def _choice(self, number: int) -> OutputProcessor:
        """An empty one for a prompt. Only answers to conversations are parted: what goes on a text is text."""
        model, prompt = self.model, self.prompts[number]
        reader = None
        if isinstance(self.request.prompts[number], Conversation):
            reader = answer_reader(model.answer_format, model.tokenizer, prompt, self.rules)
        marks = NO_MARKS if reader is None else model.answer_format.marks.bytes_of
        return OutputProcessor(
            model.tokenizer, prompt, self.request, ends=self.card.eos_token_ids, marks=marks, reader=reader
        )


def answer_reader(
    answers: AnswerFormat, tokenizer: Tokenizer, prompt: Sequence[int], rules: ToolRules | None
) -> AnswerParser | None:
    """Makes the parser of answers to a prompt; None: they are nothing but text."""
    calls = None if rules is None else answers.call_parser({tool.name for tool in rules.callable})
    reasoning = answers.reasoning_parser(inside=answers.opens_thought(tokenizer, prompt))
    if calls is None and reasoning is None:
        return None
    return AnswerParser(reasoning, calls, answers.marks, new_id=partial(new_object_id, "call"))
