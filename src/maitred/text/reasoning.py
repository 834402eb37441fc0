"""What a model thinks before it answers: ``<think>…</think>``, as DeepSeek-R1 and Qwen3 write it.

Some chat templates write the opening tag themselves, at the end of the prompt; the answer then begins within the
thought. White space around a thought belongs neither to it nor to the answer.
"""

from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.events import MarkerScanner

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Parts the thought of one choice from its answer, however the text is cut into pieces.

    Only the beginning of an answer can be a thought. One that is never closed is all that there is.

    Args:
        marks: Of the model.
        inside: The prompt has opened the thought.

    Attributes:
        thinking: Whether what came last belongs to the thought, or may.
    """

    def __init__(self, marks: SpecialTokenText, *, inside: bool) -> None:
        self._open = marks[OPEN]
        self._thought = MarkerScanner(marks[CLOSE])
        self._before: str | None = None if inside else ""
        """What came before anything that is no white space; None: the thought has begun."""
        self._trims = inside
        """Whether nothing of the thought, or of the answer behind it, has come but white space."""
        self.thinking = inside

    def push(self, text: str) -> tuple[str, str]:
        """Takes more text; returns what it adds to the thought, and to the answer."""
        if self._before is not None:
            text = self._read_before(self._before + text)
        if not self.thinking:
            return "", self._trimmed(text)
        thought, behind = self._thought.push(text)
        thought = self._trimmed(thought)
        if behind is None:
            return thought, ""
        self.thinking, self._trims = False, True
        return thought, self._trimmed(text[behind:])

    def flush(self) -> tuple[str, str]:
        """The answer is over: what was held back of either."""
        if self._before is not None:
            return "", self._before
        return (self._trimmed(self._thought.flush()).rstrip(), "") if self.thinking else ("", "")

    def _read_before(self, whole: str) -> str:
        """Goes on where a thought may begin; returns what is to be read on."""
        rest = whole.lstrip()
        if rest.startswith(self._open):
            self._before, self.thinking, self._trims = None, True, True
            return rest[len(self._open) :]
        if self._open.startswith(rest):
            self._before = whole
            return ""
        self._before = None
        return whole

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
