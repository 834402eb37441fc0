"""Format of tool calls and reasoning in the answers of a model, read from its chat template.

The chat template writes earlier calls of the model into the prompt. The markers that the template writes around a call
are therefore the markers that the model was trained to write.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from maitred.core.errors import InvalidRequest
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
        calls: Style in which the model calls tools, or None if it cannot call tools.
        reasoning: Style in which the model writes its reasoning, or None if it writes none or the template does not
            show the style.
        marks: Tokens that mark the beginning and the end of calls and reasoning.
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
        """Returns the answer format of the model of this tokenizer.

        Args:
            tokenizer: Tokenizer with its chat template. A model without a template has no conversations, and therefore
                neither calls nor reasoning.
            calls: Call style from the configuration; ``auto`` selects the style that the template shows.
            reasoning: Reasoning style from the configuration; ``auto`` selects the style that the template shows.
        """
        template = tokenizer.chat_template
        source, tool_source = ("", "") if template is None else (template.source, template.tool_source)
        style = _calls_in(tool_source) if calls == "auto" else None if calls == "none" else calls
        if template is None or not template.knows_tools:
            style = None
        thinks = (THOUGHT_ENDS in source) if reasoning == "auto" else reasoning == "think"
        markers = [*(_MARKERS[style] if style else ()), *((THOUGHT_BEGINS, THOUGHT_ENDS) if thinks else ())]
        marks = SpecialTokenText({marker: tokenizer.added_token(marker) for marker in markers})
        return cls(style, "think" if thinks else None, marks)

    def call_parser(self, names: Set[str]) -> CallParser | None:
        """Returns a parser for an answer that may call these tools, or None if it cannot have calls."""
        return _PARSERS[self.calls](names, self.marks) if self.calls and names else None

    def reasoning_parser(self, *, inside: bool, begun: bool = False) -> ReasoningParser | None:
        """Returns a parser for the reasoning of an answer.

        `inside` is True if the prompt ends within an open reasoning block, `begun` if some of it has been written.
        """
        return ReasoningParser(self.marks, inside=inside, begun=begun) if self.reasoning else None

    def opens_thought(self, tokenizer: Tokenizer, prompt: Sequence[int], begun: str = "") -> bool:
        """Returns whether the prompt ends within an open reasoning block.

        Args:
            tokenizer: Tokenizer of the model.
            prompt: The prompt.
            begun: Text of the answer at the end of the prompt; empty: the prompt ends before the answer.
        """
        if self.reasoning is None:
            return False
        if begun.strip():
            return THOUGHT_BEGINS in begun.rpartition(THOUGHT_ENDS)[2]
        tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(THOUGHT_BEGINS)

    def prefix_tokens(
        self, tokenizer: Tokenizer, prompt: Sequence[int], thought: str, text: str
    ) -> tuple[list[int], int] | None:
        """Writes the beginning of an answer as this model would have written it.

        Reasoning stands as the template writes it in earlier answers. Where the prompt has opened a reasoning block and
        there is no reasoning, the block is closed at once.

        Args:
            tokenizer: Tokenizer of the model.
            prompt: The prompt.
            thought: Reasoning; without a text, the answer is still within it.
            text: Text of the answer.

        Returns:
            The tokens, and how many of them are reasoning; None: the model cannot write this.
        """
        opened = self.opens_thought(tokenizer, prompt)
        if thought and self.reasoning is None:
            return None
        opening, closing = _thought_tags(tokenizer) if thought or opened else ("", "")
        opening = "" if opened else opening
        if text:
            thought = thought.strip()
            closing = closing.rstrip() if text[0].isspace() else closing
        else:
            thought, closing = thought.lstrip(), ""
        begun = f"{opening}{thought}{closing}"
        marked = f"{opening}{tokenizer.mark(thought)}{closing}"
        tokens = tokenizer.encode_marked(f"{marked}{tokenizer.mark(text)}")
        shown = tokenizer.decode(tokens, skip_special_tokens=False)
        spoken = {token for token in self.marks.tokens.values() if token is not None}
        if shown != f"{begun}{text}" or (tokenizer.control_tokens.keys() & {*tokens}) - spoken:
            return None
        return tokens, len(tokenizer.encode_marked(marked)) if thought else 0


PLAIN_ANSWERS = AnswerFormat(None, None, SpecialTokenText({}))
"""Format of completions: neither calls nor reasoning."""
_ASKED, _THOUGHT, _SAID = "quaestio", "cogitatio", "responsum"
"""Words that no template writes by itself."""


def _thought_tags(tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns what the template writes before and behind the reasoning of an earlier answer.

    Templates that show no earlier reasoning are of models that write it as DeepSeek-R1 and Qwen 3 do.
    """
    answer = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT, "reasoning": _THOUGHT}
    shown = ""
    if tokenizer.chat_template is not None:
        with suppress(InvalidRequest):
            shown = tokenizer.chat_template.render(
                [{"role": "user", "content": _ASKED}, answer], add_generation_prompt=False
            )
    found = re.search(rf"({THOUGHT_BEGINS}\s*){_THOUGHT}(\s*{THOUGHT_ENDS}\s*){_SAID}", shown)
    return (found[1], found[2]) if found else (f"{THOUGHT_BEGINS}\n", f"\n{THOUGHT_ENDS}\n\n")


def _calls_in(template: str) -> CallStyle | None:
    """Returns the style of earlier calls in a chat template, or None if there is no known style."""
    if mistral.OPEN in template:
        return "mistral"
    if hermes.OPEN in template and not re.search(r"<function=|<arg_key>", template):
        return "hermes"
    if llama3.TAG in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return None
