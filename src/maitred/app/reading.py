"""A request as the model that will serve it reads it: in tokens, with the room that they leave."""

from collections.abc import Sequence
from dataclasses import dataclass

from maitred.app.choice import Choice
from maitred.core.answer import Ask
from maitred.core.ports import ModelCard
from maitred.routing.catalog import ServedModel


@dataclass(frozen=True, slots=True)
class Reading:
    """What is asked, tokenised and checked.

    Attributes:
        model: Who is to serve it.
        card: What is known of that model.
        ask: What the caller asked.
        prompts: In tokens; at least one.
        rooms: For each prompt the most tokens that a choice may have.
    """

    model: ServedModel
    card: ModelCard
    ask: Ask
    prompts: Sequence[list[int]]
    rooms: Sequence[int]

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together."""
        return sum(map(len, self.prompts))

    @property
    def choice_count(self) -> int:
        """Answers to all prompts together."""
        return len(self.prompts) * self.ask.sampling.n

    def choices(self) -> list[Choice]:
        """An empty choice for each answer, in their order."""
        return [
            Choice(self.model.tokenizer, prompt, self.ask, ends=self.card.eos_token_ids)
            for prompt in self.prompts
            for _ in range(self.ask.sampling.n)
        ]
