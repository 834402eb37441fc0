"""One choice of an answer on its way from tokens to text.

The replica sends tokens; the caller reads text. In between: bytes become whole characters, the text waits while it
could still turn into a stop string, and a stop string that completes ends the choice. Tokens are counted up to and
including the one that completed it, because that is what it took to find out. What is left is parted into what was
thought, what was said and which tools were called.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from maitred.core.answer import InferenceRequest, TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason, TokenDelta, TokenLogprobs
from maitred.text.answer_reader import AnswerParser, AnswerSegment
from maitred.text.stop import StopWindow
from maitred.text.tokenizer import NO_MARKS, Detokenizer, Tokenizer
from maitred.wire.openai.responses import REASONING_FIELDS


class OutputProcessor:
    """Takes deltas in, gives parts out.

    Args:
        tokenizer: The model's.
        prompt: What comes before the first token; its end can change how that one reads.
        request: For its stop strings, `min_tokens` and `echo`.
        ends: The tokens with which the model ends its turn. They are counted, not shown.
        marks: Token -> what stands for it in the text that the reader gets.
        reader: Parts the text; None: all of it was said.

    Attributes:
        prompt_tokens: How many its prompt has.
        tokens: How many this choice has, up to its end.
        thought_tokens: How many of these were thought.
        plain: Whether there is nothing to look for in it and nothing to tell of it beside the text.
        finish: Why it ended; None while it goes on.
        last_token_s: When tokens last came; for whoever measures.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        request: InferenceRequest,
        *,
        ends: Sequence[int],
        marks: Mapping[int, bytes] = NO_MARKS,
        reader: AnswerParser | None = None,
    ) -> None:
        self.prompt_tokens = len(prompt)
        self.tokens = 0
        self.thought_tokens = 0
        self.finish: FinishReason | None = None
        self.last_token_s: float | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt, marks)
        self._reader = reader
        self.plain = not request.stops and request.sampling.top_logprobs is None and reader is None
        self._window = StopWindow(request.stops) if request.stops else None
        self._min_tokens = request.sampling.min_tokens
        self._hidden = frozenset((*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else ends)))
        self._text = [tokenizer.decode(prompt)] if request.echo else []
        self._characters = sum(map(len, self._text))
        """Of the text so far; counted only where somebody may ask."""
        self._scores: list[TokenScore] | None = None if request.sampling.top_logprobs is None else []

    def process(self, delta: TokenDelta) -> None:
        """Takes the next delta; may set `finish`, also where the replica would have gone on."""
        tokens = delta.tokens
        shown = len(tokens)
        if delta.finish is FinishReason.STOP and tokens and tokens[-1] in self._hidden:
            shown -= 1
        if self.plain:
            self._text.append(self._detokenizer.push(tokens if shown == len(tokens) else tokens[:shown]))
            self.tokens += len(tokens)
        else:
            # The first token that completes a stop string is the last one that counts.
            for position in range(shown):
                self.tokens += 1
                thinking = self._reader is not None and self._reader.thinking
                if self._scores is not None and delta.logprobs is not None:
                    self._scores.append(self._score(tokens[position], delta.logprobs[position]))
                stopped = self._show(self._detokenizer.push(tokens[position : position + 1]))
                if self._reader is not None:
                    self._reader.push(self._add_text())
                    self.thought_tokens += thinking or self._reader.thinking
                if stopped:
                    self.finish = FinishReason.STOP
                    break
            else:
                self.tokens += len(tokens) - shown
        if self.finish is None and delta.finish is not None:
            self._end(delta.finish)

    def deltas(self, index: int) -> list[TextDelta]:
        """Returns what there is to show since the last call; empty if all of it is held back."""
        if self._reader is None and self._scores is None and self.finish is None:
            return [TextDelta(index, text)] if (text := self._add_text()) else []
        passages = self._segments()
        scores = self._scores
        if not passages and not scores and self.finish is None:
            return []
        if scores is not None:
            self._scores = []
        stop = None if self._window is None else self._window.stop
        parts = [_part(index, passage) for passage in passages] or [TextDelta(index, "")]
        parts[0] = replace(parts[0], scores=scores)
        parts[-1] = replace(parts[-1], finish=self._finish_text, stop=stop)
        return parts

    @property
    def _finish_text(self) -> FinishReason | None:
        """Why it ended, to its caller: a turn that ends after calls has ended for them."""
        calls = self._reader is not None and self._reader.calls and self.finish is FinishReason.STOP
        stopped = self._window is not None and self._window.stop is not None
        return FinishReason.TOOL_CALLS if calls and not stopped else self.finish

    def _add_text(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text

    def _segments(self) -> list[AnswerSegment]:
        text = self._add_text()
        if self._reader is None:
            return [AnswerSegment(text=text)] if text else []
        self._reader.push(text)
        if self.finish is not None:
            self._reader.flush()
        return self._reader.take()

    def _show(self, text: str) -> bool:
        """Passes text through the stop window; True if a stop string completed."""
        self._characters += len(text)
        if self._window is None or self.tokens <= self._min_tokens:
            self._text.append(text)
            return False
        visible, stopped = self._window.push(text)
        self._text.append(visible)
        return stopped

    def _end(self, finish: FinishReason) -> None:
        """The replica is done: nothing needs to wait any more."""
        self.finish = finish
        rest = self._detokenizer.flush()
        if self._show(rest):
            self.finish = FinishReason.STOP
        elif self._window is not None:
            self._text.append(self._window.flush())

    def _score(self, token: int, logprobs: TokenLogprobs) -> TokenScore:
        return TokenScore(
            chosen=self._named(token, logprobs.logprob),
            top=[self._named(other, logprob) for other, logprob in logprobs.top],
            offset=self._characters,
        )

    def _named(self, token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(self._tokenizer.token_text(token), self._tokenizer.token_bytes(token), logprob)


def _part(index: int, passage: AnswerSegment) -> TextDelta:
    extra: dict[str, Any] = dict.fromkeys(REASONING_FIELDS, passage.thought) if passage.thought else {}
    if passage.calls:
        extra["tool_calls"] = passage.calls
    return TextDelta(index, passage.text, extra=extra or None)
