"""The text of one choice as an API tells of it: what was thought, what was said, and which tools were called."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from maitred.text.reasoning import ReasoningParser
from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.events import CallParser, Event, TextEvent, ToolCallArguments, ToolCallStart


@dataclass(slots=True)
class AnswerSegment:
    """A part of an answer, in the order of its members: nothing in it came before what stands above it."""

    thought: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """As in a delta of OpenAI's: the first piece of a call has its id and name, the others pieces of its arguments."""


class AnswerParser:
    """Reads the text of one choice as it comes.

    Args:
        reasoning: Parts the thought; None: there is none.
        calls: Finds the calls; None: there are none.
        marks: Of the model; what is text after all shows them as they are written.
        new_id: Makes the id of a call.

    Attributes:
        calls: How many have begun.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: CallParser | None,
        marks: SpecialTokenText,
        *,
        new_id: Callable[[], str],
    ) -> None:
        self._reasoning = reasoning
        self._parser = calls
        self._marks = marks
        self._new_id = new_id
        self._passages: list[AnswerSegment] = []
        self.calls = 0

    @property
    def thinking(self) -> bool:
        """Whether what comes next belongs to the thought."""
        return self._reasoning is not None and self._reasoning.thinking

    def push(self, text: str) -> None:
        """Takes more text."""
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
            self._add_thought(thought)
        self._add(text)

    def flush(self) -> None:
        """The answer is over."""
        if self._reasoning is not None:
            thought, text = self._reasoning.flush()
            self._add_thought(thought)
            self._add(text)
        if self._parser is not None:
            self._note(self._parser.flush())

    def take(self) -> list[AnswerSegment]:
        """What has come since the last call."""
        passages, self._passages = self._passages, []
        return passages

    def _add(self, text: str) -> None:
        if text:
            self._note([TextEvent(text)] if self._parser is None else self._parser.push(text))

    def _add_thought(self, thought: str) -> None:
        if thought:
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
        """The last one, if more can be added to it in its order; else a new one."""
        last = self._passages[-1] if self._passages else None
        if last is None or (ends_with_text and last.calls) or (ends_with_thought and (last.text or last.calls)):
            last = AnswerSegment()
            self._passages.append(last)
        return last
