"""Reasoning of a model before its answer: ``<think>…</think>``, as DeepSeek-R1 and Qwen3 write it.

Some chat templates write the opening tag at the end of the prompt; the answer then begins inside the reasoning block.
White space around a reasoning block belongs neither to the reasoning nor to the answer.
"""

from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.events import MarkerScanner

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Streaming parser that separates the reasoning of one choice from its answer, however the text is split.

    Reasoning can stand only at the beginning of an answer. If the closing tag of the reasoning is missing, the answer
    after it is empty.

    Args:
        marks: Markers of the model.
        inside: Whether the prompt ends within an open reasoning block.
        begun: Whether some of the reasoning has been written before.

    Attributes:
        thinking: Whether the latest text belongs, or may belong, to the reasoning.
    """

    def __init__(self, marks: SpecialTokenText, *, inside: bool, begun: bool = False) -> None:
        self._open = marks[OPEN]
        self._thought = MarkerScanner(marks[CLOSE])
        self._before: str | None = None if inside else ""
        """Text before the first non-space character, or None after the start of the answer was read."""
        self._trims = inside and not begun
        """Whether the reasoning, or the answer after it, has had only white space so far."""
        self.thinking = inside

    def push(self, text: str) -> tuple[str, str]:
        """Parses more text; returns the new text of the reasoning and of the answer."""
        if self._before is not None:
            text = self._read_before(self._before + text)
        if not self.thinking:
            return "", self._trim(text)
        thought, behind = self._thought.push(text)
        thought = self._trim(thought)
        if behind is None:
            return thought, ""
        self.thinking, self._trims = False, True
        return thought, self._trim(text[behind:])

    def flush(self) -> tuple[str, str]:
        """Ends the answer; returns the held-back text of the reasoning and of the answer."""
        if self._before is not None:
            return "", self._before
        return (self._trim(self._thought.flush()).rstrip(), "") if self.thinking else ("", "")

    def _read_before(self, whole: str) -> str:
        """Reads text where reasoning may begin; returns the text that remains to be read."""
        rest = whole.lstrip()
        if rest.startswith(self._open):
            self._before, self.thinking, self._trims = None, True, True
            return rest[len(self._open) :]
        if self._open.startswith(rest):
            self._before = whole
            return ""
        self._before = None
        return whole

    def _trim(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
