"""Output of one choice on its way from tokens to text, and the spans of its time in the engine.

The replica sends tokens; the caller reads text. In between: bytes become whole characters, the text waits while it
could still turn into a stop string, and a stop string that completes ends the choice. Tokens are counted up to and
including the one that completed it, because that is what it took to find out. What is left is parted into what was
thought, what was said and which tools were called.

**Spans.** The engine counts seconds on a clock of its own, which may be that of another machine. What it says took
place between
our sending the request and our hearing of it, so it is put into the middle of that time: off by at most half of what
the messages took, and no two machines need to agree on the time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from maitred.core.inference import InferenceRequest, TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason, SequenceStats, TokenDelta, TokenLogprobs
from maitred.core.timeline import RequestTimeline, SpanName, TimelineSpan
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
                    self._reader.push(self._take_text())
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
            text = self._text.pop() if len(self._text) == 1 else self._take_text()
            return [TextDelta(index, text)] if text else []
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

    def _take_text(self) -> str:
        """Removes and returns the text that was not shown yet."""
        text = "".join(self._text)
        self._text.clear()
        return text

    def _segments(self) -> list[AnswerSegment]:
        text = self._take_text()
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
            chosen=self._to_token_logprob(token, logprobs.logprob),
            top=[self._to_token_logprob(other, logprob) for other, logprob in logprobs.top],
            offset=self._characters,
        )

    def _to_token_logprob(self, token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(self._tokenizer.token_text(token), self._tokenizer.token_bytes(token), logprob)


def _part(index: int, passage: AnswerSegment) -> TextDelta:
    extra: dict[str, Any] = dict.fromkeys(REASONING_FIELDS, passage.thought) if passage.thought else {}
    if passage.calls:
        extra["tool_calls"] = passage.calls
    return TextDelta(index, passage.text, extra=extra or None)


def record_engine_spans(
    timeline: RequestTimeline, index: int, choice: OutputProcessor, delta: TokenDelta, now_s: float
) -> None:
    """Notes what has come with a delta: the way to the first token, then that to the end.

    Args:
        timeline: Has the attempt that the delta comes from.
        index: Of the choice, among those of all prompts.
        choice: With what it has got so far, this delta included.
        delta: Has a course.
        now_s: When it came.
    """
    attempt, course = timeline.running(SpanName.ATTEMPT), delta.course
    if attempt is None or course is None:
        return
    engine = next((span for span in attempt.inside if span.facts["choice"] == index), None)
    if engine is None:
        engine = _begin(attempt, index, choice, delta, course, now_s)
    if delta.finish is None:
        return
    # The end bounds the time on the way, too, where we came late to hear of the first token.
    offset_s = engine.began_s - attempt.began_s
    slack_s = now_s - attempt.began_s - course.waited_s - course.prefill_s - course.decode_s
    began_s = attempt.began_s + max(0.0, min(offset_s, slack_s / 2))
    first_s = _lay_out(engine, began_s, course)
    engine.facts |= {
        "output_tokens": choice.tokens,
        "finish_reason": str(delta.finish),
        "preemptions": course.preemptions,
        "displaced_s": round(course.displaced_s, 6),
        "recomputed_tokens": course.recomputed_tokens,
    }
    if course.decode_steps:
        decode = TimelineSpan(
            SpanName.DECODE,
            first_s,
            {"steps": course.decode_steps, "batch": round(course.decode_batch, 2), "output_tokens": choice.tokens},
        )
        decode.end(first_s + course.decode_s)
        engine.inside.append(decode)
    engine.end(first_s + course.decode_s)


def _begin(
    attempt: TimelineSpan, index: int, choice: OutputProcessor, delta: TokenDelta, course: SequenceStats, now_s: float
) -> TimelineSpan:
    """The way to the first token."""
    slack_s = now_s - attempt.began_s - course.waited_s - course.prefill_s
    began_s = attempt.began_s + max(0.0, slack_s) / 2
    engine = TimelineSpan(SpanName.ENGINE, began_s, {"choice": index, "replica": attempt.facts["replica"]})
    prefill = {
        "prompt_tokens": choice.prompt_tokens,
        "cached_tokens": delta.cached_tokens,
        "steps": course.prefill_steps,
        "batch": course.prefill_batch,
    }
    engine.inside += [
        TimelineSpan(SpanName.ENGINE_QUEUE, began_s, {"waited_ms": delta.waited_ms or {}}),
        TimelineSpan(SpanName.PREFILL, began_s, prefill),
    ]
    _lay_out(engine, began_s, course)
    attempt.inside.append(engine)
    return engine


def _lay_out(engine: TimelineSpan, began_s: float, course: SequenceStats) -> float:
    """Puts the way to the first token behind the moment of arrival; when that token came."""
    waited, prefill = engine.inside
    engine.began_s = waited.began_s = began_s
    waited.ended_s = prefill.began_s = began_s + course.waited_s
    prefill.ended_s = prefill.began_s + course.prefill_s
    return prefill.ended_s


class EncodingSpans:
    """The texts of one attempt.

    A request may bring thousands of texts, and the engine reports each. They are recorded together: the wait until the
    first was begun, and the time from then until the last was computed, with other callers' batches in between. As for
    generated tokens, the engine's times are put into the middle of the time between our sending and our receiving.
    """

    def __init__(self) -> None:
        self._texts = self._tokens = self._batches = 0
        self._begun_s: float | None = None
        """From a text's arrival in the engine to its batch, for the one that waited least."""
        self._done_s = 0.0
        """From a text's arrival to its vector, for the last one."""
        self._waited_ms: dict[str, float] = {}
        """By cause, the longest."""

    def on_report(self, delta: TokenDelta, tokens: int) -> None:
        """A text has its vector.

        Args:
            delta: Has it.
            tokens: Of the text.
        """
        if (course := delta.course) is None:
            return
        self._texts += 1
        self._tokens += tokens
        self._batches += course.prefill_batch
        self._begun_s = course.waited_s if self._begun_s is None else min(self._begun_s, course.waited_s)
        self._done_s = max(self._done_s, course.waited_s + course.prefill_s)
        for cause, waited_ms in (delta.waited_ms or {}).items():
            self._waited_ms[cause] = max(self._waited_ms.get(cause, 0.0), waited_ms)

    def record(self, attempt: TimelineSpan, now_s: float) -> None:
        """Writes into the attempt what was heard; nothing, of an engine that does not tell.

        Args:
            attempt: Has not ended.
            now_s: When the last was heard.
        """
        if self._begun_s is None:
            return
        began_s = attempt.began_s + max(0.0, now_s - attempt.began_s - self._done_s) / 2
        engine = TimelineSpan(SpanName.ENGINE, began_s, {"replica": attempt.facts["replica"], "texts": self._texts})
        waited = TimelineSpan(SpanName.ENGINE_QUEUE, began_s, {"waited_ms": self._waited_ms})
        encode = TimelineSpan(
            SpanName.ENCODE,
            began_s + self._begun_s,
            {"prompt_tokens": self._tokens, "batch": round(self._batches / self._texts, 2)},
        )
        ended_s = min(now_s, began_s + self._done_s)
        waited.end(encode.began_s)
        encode.end(ended_s)
        engine.end(ended_s)
        engine.inside += [waited, encode]
        attempt.inside.append(engine)
