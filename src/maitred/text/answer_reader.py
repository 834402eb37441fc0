"""Streaming parser that splits the text of one choice into reasoning, text and tool calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from maitred.core.ids import new_object_id
from maitred.text.reasoning import ReasoningParser
from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.events import CallParser, Event, TextEvent, ToolCallArguments, ToolCallStart


@dataclass(slots=True)
class AnswerSegment:
    """Part of an answer: its reasoning, then its text, then its calls, in the order of the fields."""

    thought: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Pieces of calls as in OpenAI's deltas.

    The first piece of a call has its id and name, and the other pieces have its arguments.
    """


_new_call_id = partial(new_object_id, "call")


class AnswerParser:
    """Streaming parser of one choice's text.

    Args:
        reasoning: Parser that separates the reasoning, or None if the model writes none.
        calls: Parser that finds the calls, or None if the answer cannot have calls.
        marks: Markers of the model. A marker that turns out to be plain text is replaced by its literal text.
        thought: Reasoning that another model has written before, and that the answer continues.
        opened: Whether the prompt has opened the reasoning.
        new_id: Function that makes the id of a new call.

    Attributes:
        call_count: Number of calls that have begun.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: CallParser | None,
        marks: SpecialTokenText,
        *,
        thought: str = "",
        opened: bool = False,
        new_id: Callable[[], str] = _new_call_id,
    ) -> None:
        self._reasoning = reasoning
        self._parser = calls
        self._marks = marks
        self._new_id = new_id
        self._unclosed: list[str] | None = [thought] if opened and reasoning is not None else None
        """Reasoning so far, if the prompt has opened it and it is not closed."""
        self._passages: list[AnswerSegment] = []
        self.calls = 0

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._reasoning is not None and self._reasoning.thinking

    def push(self, text: str) -> None:
        """Parses more text of the answer."""
        if self._reasoning is not None:
            text = self.push_thought(text)
        self._add(text)

    def push_thought(self, text: str, *, final: bool = False) -> str:
        """Parses the reasoning in more text of the answer; returns the text behind it, which is still to be pushed.

        `final` is True at the end of the answer, where no reasoning can follow.
        """
        if self._reasoning is None:
            return text
        thought, rest = self._reasoning.push(text)
        self._add_thought(thought)
        if not self._reasoning.thinking:
            self._unclosed = None
        if final:
            thought, held = self._reasoning.flush()
            self._add_thought(thought)
            self._reasoning = None
            rest += held
        return rest

    def take_unclosed_thought(self) -> str:
        """Returns, once, the whole reasoning if the prompt has opened it and the model ended its turn without closing.

        Such a model has answered at once, so this text is the answer.
        """
        thought, self._unclosed = self._unclosed or (), None
        return "".join(thought)

    def flush(self) -> None:
        """Ends the answer and parses the text that was held back."""
        self._add(self.push_thought("", final=True))
        if self._parser is not None:
            self._note(self._parser.flush())

    def take(self) -> list[AnswerSegment]:
        """Returns the segments since the last call, and removes them."""
        passages, self._passages = self._passages, []
        return passages

    def _add(self, text: str) -> None:
        if text:
            self._note([TextEvent(text)] if self._parser is None else self._parser.push(text))

    def _add_thought(self, thought: str) -> None:
        if thought:
            if self._unclosed is not None:
                self._unclosed.append(thought)
            self._passage(ends_with_thought=True).thought += self._marks.literal(thought)

    def _note(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case TextEvent(text):
                    if text:
                        self._passage(ends_with_text=True).text += self._marks.literal(text)
                case ToolCallStart(name):
                    function = {"name": name, "arguments": ""}
                    piece = {"index": self.calls, "id": self._new_id(), "type": "function", "function": function}
                    self._passage().calls.append(piece)
                    self.calls += 1
                case ToolCallArguments(arguments):
                    if arguments:
                        self._give(self._marks.literal(arguments))

    def _give(self, arguments: str) -> None:
        calls, index = self._passage().calls, self.calls - 1
        if calls and "id" not in calls[-1] and calls[-1]["index"] == index:
            calls[-1]["function"]["arguments"] += arguments
        else:
            calls.append({"index": index, "function": {"arguments": arguments}})

    def _passage(self, *, ends_with_text: bool = False, ends_with_thought: bool = False) -> AnswerSegment:
        """Returns the last segment if its field order allows more data; otherwise appends a new one."""
        last = self._passages[-1] if self._passages else None
        if last is None or (ends_with_text and last.calls) or (ends_with_thought and (last.text or last.calls)):
            last = AnswerSegment()
            self._passages.append(last)
        return last
