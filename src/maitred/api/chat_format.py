"""Answers to chats as OpenAI writes them, whole and as events.

Most are one text and nothing else. They are written into forms, which are cut out of what the encoder makes once, when
this is imported.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from maitred.api.streaming import CollectedChoice
from maitred.core.answer import TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason, Usage
from maitred.wire.event_template import EventTemplates, JsonTemplate, encode_text
from maitred.wire.openai.requests import ChatRequest
from maitred.wire.openai.responses import (
    CONTINUED,
    REASONING_FIELDS,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Finish,
    Marks,
    TopLogprob,
    UsageBody,
    encode,
    to_finish_reason,
    to_stop_reason,
)
from maitred.wire.openai.written import merge_deltas
from maitred.wire.sse import encode_event

_CALLS = frozenset({"tool_calls", "function_call"})


class ChatFormatter:
    """Writes one chat answer.

    Args:
        request: What it answers.
        answer_id: What it is called.
    """

    def __init__(self, request: ChatRequest, answer_id: str) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = request.model
        self._choices = request.choices
        self._include_usage = request.include_usage
        self._of_functions = not request.tools and bool(request.functions)
        self._hidden = REASONING_FIELDS if request.include_reasoning is False else ()
        self._templates = EventTemplates()

    def start(self) -> bytes:
        """Every choice begins with who speaks."""
        opening = ChatDelta(role="assistant", content="")
        return b"".join(self._event(ChatChunkChoice(index=i, delta=opening)) for i in range(self._choices))

    def events(self, parts: Sequence[TextDelta]) -> bytes:
        """One event for new text, and one of its own for the end of a choice."""
        event, full = self._templates.encode, self._text
        if len(parts) == 1 and (part := parts[0]).plain:
            return event(part.index, part.text, full)
        return b"".join([event(part.index, part.text, full) if part.plain else self._written(part) for part in parts])

    def end(self, usage: Usage) -> bytes:
        """The usage, if asked for, in a chunk without choices."""
        return encode_event(encode(self._chunk([], UsageBody.of(usage)))) if self._include_usage else b""

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """The answer as one object."""
        if len(choices) != 1 or not choices[0].plain or usage.reasoning_tokens or usage.estimated:
            return self.in_full(choices, usage)
        return _PLAIN.fill(
            (
                *(encode_text(self._id), self._created, encode_text(self._model)),
                *(encode_text("".join(choices[0].text)), encode_text(self._finish_of(choices[0].finish))),
                *(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens),
            )
        )

    def in_full(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """The same, whatever is in it."""
        return encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[
                    ChatChoice(
                        index=index,
                        message=self._message(choice),
                        logprobs=_logprobs(choice.scores),
                        finish_reason=self._finish_of(choice.finish),
                        stop_reason=to_stop_reason(choice.finish),
                    )
                    for index, choice in enumerate(choices)
                ],
                usage=UsageBody.of(usage),
            )
        )

    def _text(self, index: int, text: str) -> bytes:
        form = _TEXT_BEFORE_USAGE if self._include_usage else _TEXT
        said = encode_text(self._id), self._created, encode_text(self._model), index, encode_text(text)
        return form.fill(said)

    def _written(self, part: TextDelta) -> bytes:
        return b"".join(self._event(choice, part) for choice in self._chunks_of(part))

    def _chunks_of(self, part: TextDelta) -> Iterable[ChatChunkChoice]:
        extra = self._shown(part.extra or {})
        if part.text or part.scores or extra:
            # Text that is not there is not an empty text: clients tell tool calls from answers by it.
            content = part.text if part.text or not extra else UNSET
            delta = ChatDelta(content=content, **extra)
            yield ChatChunkChoice(index=part.index, delta=delta, logprobs=_logprobs(part.scores))
        if part.finish is not None:
            yield ChatChunkChoice(
                index=part.index,
                delta=ChatDelta(),
                finish_reason=self._finish_of(part.finish),
                stop_reason=to_stop_reason(part.finish),
            )

    def _message(self, choice: CollectedChoice) -> ChatMessage:
        text = "".join(choice.text)
        extra = self._shown(merge_deltas(choice.extras))
        return ChatMessage(content=text if text or not _CALLS.intersection(extra) else None, **extra)

    def _shown(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Members of a message as its reader knows them, without those that it does not want."""
        if self._of_functions and "tool_calls" in extra:
            functions = [call.get("function") or {} for call in extra["tool_calls"]]
            named = [function["name"] for function in functions if function.get("name")]
            given = "".join(function.get("arguments") or "" for function in functions)
            called = {**({"name": named[0]} if named else {}), "arguments": given}
            extra = {name: value for name, value in extra.items() if name != "tool_calls"} | {"function_call": called}
        if not self._hidden:
            return extra
        return {name: value for name, value in extra.items() if name not in self._hidden}

    def _finish_of(self, reason: FinishReason) -> Finish:
        return "function_call" if self._of_functions and reason is FinishReason.TOOL_CALLS else to_finish_reason(reason)

    def _event(self, choice: ChatChunkChoice, part: TextDelta | None = None) -> bytes:
        marks = CONTINUED if part is not None and part.continued else UNSET
        return encode_event(encode(self._chunk([choice], None if self._include_usage else UNSET, marks)))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None, marks: Marks | UnsetType = UNSET
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, maitred=marks
        )


def _text_form(usage: UsageBody | UnsetType | None) -> JsonTemplate:
    """Of an event with nothing but a text."""
    choice = ChatChunkChoice(index=1002, delta=ChatDelta(content="a text"))
    chunk = ChatChunk(id="an id", created=1001, model="a model", choices=[choice], usage=usage)
    return JsonTemplate(encode_event(encode(chunk)), (b'"an id"', b"1001", b'"a model"', b"1002", b'"a text"'))


_TEXT = _text_form(UNSET)
_TEXT_BEFORE_USAGE = _text_form(None)
_PLAIN = JsonTemplate(
    encode(
        ChatCompletion(
            id="an id",
            created=1001,
            model="a model",
            choices=[ChatChoice(index=0, message=ChatMessage(content="a text"), finish_reason="stop")],
            usage=UsageBody.of(Usage(1002, 1003, 1004)),
        )
    ),
    (b'"an id"', b"1001", b'"a model"', b'"a text"', b'"stop"', b"1002", b"1003", b"2005", b"1004"),
)
"""Of one choice with nothing but a text."""


def _logprobs(scores: list[TokenScore] | None) -> ChatLogprobs | None:
    if scores is None:
        return None
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=score.chosen.text,
                logprob=score.chosen.logprob,
                bytes=list(score.chosen.raw),
                top_logprobs=[_top(other) for other in score.top],
            )
            for score in scores
        ]
    )


def _top(score: TokenLogprob) -> TopLogprob:
    return TopLogprob(token=score.text, logprob=score.logprob, bytes=list(score.raw))
