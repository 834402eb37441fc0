"""Format of what is not plain text in a model's answers (tool calls and reasoning), read from its chat template.

The template shows the model its own earlier calls. So the markers that the template writes around a call are the
markers that the model has been trained to write.
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
    """Format of a model's answers: how it writes tool calls and reasoning.

    Attributes:
        calls: Style in which the model calls tools; None: it has none.
        reasoning: Style in which the model writes its reasoning; None: it writes none, or the template does not show
            any.
        marks: Tokens that mark calls and reasoning.
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
        """Returns the answer format of the model that this tokenizer belongs to.

        Args:
            tokenizer: Tokenizer with its chat template. Without a template, the model has no conversations, so no calls
                and no reasoning.
            calls: Call style from the configuration; ``auto``: as the template shows.
            reasoning: Reasoning style from the configuration; ``auto``: as the template shows.
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
        """Returns a parser for an answer that may call tools of these names; None: no calls are possible."""
        return _PARSERS[self.calls](names, self.marks) if self.calls and names else None

    def reasoning_parser(self, *, inside: bool) -> ReasoningParser | None:
        """Returns a parser for the reasoning of an answer; `inside`: the prompt has opened the thought already."""
        return ReasoningParser(self.marks, inside=inside) if self.reasoning else None

    def opens_thought(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Returns whether the prompt ends within a thought that it has opened."""
        if self.reasoning is None:
            return False
        tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(THOUGHT_BEGINS)


def _calls_in(template: str) -> CallStyle | None:
    """Returns the style in which a chat template shows earlier calls; None: it shows none, or in an unknown style."""
    if mistral.OPEN in template:
        return "mistral"
    if hermes.OPEN in template and not re.search(r"<function=|<arg_key>", template):
        return "hermes"
    if llama3.TAG in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return None
