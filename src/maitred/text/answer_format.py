"""How a model writes what is no plain text: calls of tools, and thoughts. Its chat template shows it.

The template shows a model its own earlier calls, so the markers that it writes around them are those that the model has
been trained to write.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from maitred.text.reasoning import CLOSE as THOUGHT_ENDS
from maitred.text.reasoning import OPEN as THOUGHT_BEGINS
from maitred.text.reasoning import ReasoningParser
from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tokenizer import Tokenizer
from maitred.text.tool_calls import hermes, llama3, mistral
from maitred.text.tool_calls.events import CallParser

CallStyle = Literal["hermes", "llama3_json", "mistral"]
ReasoningStyle = Literal["think"]

_TAIL_TOKENS = 8
_MARKERS: Mapping[CallStyle, tuple[str, ...]] = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3_json": (llama3.TAG,),
    "mistral": (mistral.OPEN, mistral.CALL_ID, mistral.ARGUMENTS),
}
_PARSERS: Mapping[CallStyle, Callable[[Set[str], SpecialTokenText], CallParser]] = {
    "hermes": hermes.HermesParser,
    "llama3_json": llama3.Llama3Parser,
    "mistral": mistral.MistralParser,
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What a model's answers are made of.

    Attributes:
        calls: How it calls tools; None: it knows none.
        reasoning: How it thinks; None: it does not, or nobody can tell.
        marks: The tokens that mark either.
    """

    calls: CallStyle | None
    reasoning: ReasoningStyle | None
    marks: SpecialTokenText

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        calls: Literal[CallStyle, "auto", "none"] = "auto",
        reasoning: Literal[ReasoningStyle, "auto", "none"] = "auto",
    ) -> "AnswerFormat":
        """That of the model whose tokenizer this is.

        Args:
            tokenizer: With its chat template. Without one, the model has no conversations, so nothing of this.
            calls: As its operator says; ``auto``: as its template shows.
            reasoning: The same.
        """
        template = tokenizer.chat_template
        source = "" if template is None else template.source
        style = _calls_in(source) if calls == "auto" else None if calls == "none" else calls
        if template is None or not template.knows_tools:
            style = None
        thinks = (THOUGHT_ENDS in source) if reasoning == "auto" else reasoning == "think"
        markers = [*(_MARKERS[style] if style else ()), *((THOUGHT_BEGINS, THOUGHT_ENDS) if thinks else ())]
        marks = SpecialTokenText({marker: tokenizer.added_token(marker) for marker in markers})
        return cls(style, "think" if thinks else None, marks)

    def call_parser(self, names: Set[str]) -> CallParser | None:
        """For an answer that may call tools of these names."""
        return _PARSERS[self.calls](names, self.marks) if self.calls and names else None

    def reasoning_parser(self, *, inside: bool) -> ReasoningParser | None:
        """For an answer to a prompt that has opened a thought, or not."""
        return ReasoningParser(self.marks, inside=inside) if self.reasoning else None

    def opens_thought(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends within a thought."""
        if self.reasoning is None:
            return False
        tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(THOUGHT_BEGINS)


def _calls_in(template: str) -> CallStyle | None:
    """The way that a chat template shows earlier calls in; None: it shows none, or in a way that is not known here."""
    if mistral.OPEN in template:
        return "mistral"
    if hermes.OPEN in template and not re.search(r"<function=|<arg_key>", template):
        return "hermes"
    if llama3.TAG in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return None
