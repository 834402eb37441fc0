"""Output processing of one choice (tokens to text), and trace spans of its time in the engine.

The replica sends tokens; the caller reads text. The processor decodes bytes to whole characters, holds back text that
may be the start of a stop string, and ends the choice at a complete stop string. The token that completes the stop
string is counted. The remaining text is split into reasoning, content and tool calls.

**Spans.** The engine counts seconds on a clock of its own, which may be that of another machine. What it says took
place between our sending the request and our hearing of it, so it is put into the middle of that time: off by at most
half of what the messages took, and no two machines need to agree on the time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from maitred.app.request.prompt_scores import PromptScoreReader
from maitred.core.inference import (
    TOKEN_ID_PREFIX,
    InferenceRequest,
    PromptScores,
    TextDelta,
    TokenLogprob,
    TokenScore,
)
from maitred.core.request import FinishReason, SequenceStats, TokenDelta, TokenLogprobs
from maitred.core.timeline import RequestTimeline, SpanName, TimelineSpan
from maitred.text.answer_reader import AnswerParser, AnswerSegment
from maitred.text.stop import StopWindow
from maitred.text.tokenizer import NO_MARKS, Detokenizer, Tokenizer
from maitred.wire.openai.responses import REASONING_FIELDS


class OutputProcessor:
    """Turns token deltas of one choice into text deltas.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: Prompt tokens; they can change how the first output token is decoded.
        request: For its stop strings, `min_tokens` and `echo`, and how it wants tokens to be shown.
        eos_token_ids: End-of-sequence tokens; counted, not shown.
        special_token_text: Special token -> its text for the parser.
        parser: Parser of reasoning and tool calls; None: all text is content.
        prompt_scores: Reader of the log-probabilities of the prompt, whose choices share it; None: there are none.

    Attributes:
        prompt_scores: The same reader.
        prompt_tokens: Tokens of the prompt.
        tokens: Output tokens so far.
        reasoning_tokens: Output tokens of the reasoning.
        plain: Whether neither stop strings, log-probabilities nor a parser is needed.
        finish: Why it ended; None while it goes on.
        last_token_s: Time of the last tokens; set by the caller.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        request: InferenceRequest,
        *,
        eos_token_ids: Sequence[int],
        special_token_text: Mapping[int, bytes] = NO_MARKS,
        parser: AnswerParser | None = None,
        prompt_scores: PromptScoreReader | None = None,
    ) -> None:
        self.prompt_scores = prompt_scores
        self._unsent_prompt = None if prompt_scores is None else prompt_scores.result
        self.prompt_tokens = len(prompt)
        self.tokens = 0
        self.reasoning_tokens = 0
        self.finish: FinishReason | None = None
        self.last_token_s: float | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, prompt, special_token_text, skip_special_tokens=request.skip_special_tokens
        )
        self._parser = parser
        self.plain = not request.stops and request.sampling.top_logprobs is None and parser is None
        self._stop_checker = (
            StopWindow(request.stops, includes_stop=request.include_stop_str_in_output) if request.stops else None
        )
        self._passes_thoughts = parser is not None and not (request.stops and request.stops_in_reasoning)
        """Whether stop strings are looked for only behind the reasoning."""
        self._min_tokens = request.sampling.min_tokens
        self._hidden_stop_token_ids = frozenset(
            ()
            if request.include_stop_str_in_output
            else (*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else eos_token_ids))
        )
        self._named_stop_token_ids = frozenset(request.sampling.stop_token_ids).difference(
            () if request.sampling.ignore_eos else eos_token_ids
        )
        self._stop_token: int | None = None
        """The token of the request's own that ended the choice."""
        self._pending_text = [tokenizer.decode(prompt)] if request.echo else []
        self._text_length = sum(map(len, self._pending_text))
        """Length of the text so far; the `offset` of log-probabilities."""
        self._pending_logprobs: list[TokenScore] | None = None if request.sampling.top_logprobs is None else []
        self._pending_token_ids: list[int] | None = [] if request.return_token_ids else None
        self._names_token_ids = request.return_tokens_as_token_ids

    def process(self, delta: TokenDelta) -> None:
        """Processes a delta; sets `finish` at the last delta or at a stop string."""
        tokens = delta.tokens
        visible_count = len(tokens)
        if delta.finish is FinishReason.STOP and tokens:
            visible_count -= tokens[-1] in self._hidden_stop_token_ids
            if tokens[-1] in self._named_stop_token_ids:
                self._stop_token = tokens[-1]
        before = self.tokens
        if self.plain:
            self._pending_text.append(
                self._detokenizer.push(tokens if visible_count == len(tokens) else tokens[:visible_count])
            )
            self.tokens += len(tokens)
        else:
            # Stop counting after the token that completes a stop string.
            for position in range(visible_count):
                self.tokens += 1
                thinking = self._parser is not None and self._parser.thinking
                if self._pending_logprobs is not None and delta.logprobs is not None:
                    self._pending_logprobs.append(self._to_token_score(tokens[position], delta.logprobs[position]))
                stopped = self._append_text(self._detokenizer.push(tokens[position : position + 1]))
                if self._parser is not None:
                    self._parser.push(self._take_text())
                    self.reasoning_tokens += thinking or self._parser.thinking
                if stopped:
                    self.finish = FinishReason.STOP
                    break
            else:
                self.tokens += len(tokens) - visible_count
        if self._pending_token_ids is not None:
            self._pending_token_ids += tokens[: self.tokens - before]
        if self.finish is None and delta.finish is not None:
            self._finish(delta.finish)

    def deltas(self, index: int) -> list[TextDelta]:
        """Returns new text deltas since the last call; empty if all text is held back."""
        if self._unsent_prompt is not None:
            return self._first_deltas(index, self._unsent_prompt)
        if self._parser is None and self._pending_logprobs is None and self._pending_token_ids is None:
            text = self._pending_text.pop() if len(self._pending_text) == 1 else self._take_text()
            if self.finish is None:
                return [TextDelta(index, text)] if text else []
            stop = self._stop_token if self._stop_checker is None else self._stop
            return [TextDelta(index, text, finish=self.finish, stop=stop)]
        segments = self._segments()
        scores, token_ids = self._pending_logprobs, self._pending_token_ids
        if not segments and not scores and not token_ids and self.finish is None:
            return []
        if scores is not None:
            self._pending_logprobs = []
        if token_ids is not None:
            self._pending_token_ids = []
        deltas = [_part(index, passage) for passage in segments] or [TextDelta(index, "")]
        deltas[0] = replace(deltas[0], scores=scores, token_ids=token_ids)
        deltas[-1] = replace(deltas[-1], finish=self._client_finish_reason, stop=self._stop)
        return deltas

    def _first_deltas(self, index: int, prompt: PromptScores) -> list[TextDelta]:
        """Returns new deltas, the first with the log-probabilities of the prompt."""
        self._unsent_prompt = None
        deltas = self.deltas(index)
        if deltas:
            deltas[0] = replace(deltas[0], prompt_scores=prompt)
        else:
            self._unsent_prompt = prompt
        return deltas

    @property
    def _stop(self) -> str | int | None:
        """Stop string or stop token of the request that ended the choice; None: neither did."""
        if self._stop_checker is not None and self._stop_checker.stop is not None:
            return self._stop_checker.stop
        return self._stop_token

    @property
    def _client_finish_reason(self) -> FinishReason | None:
        """Finish reason for the client: `TOOL_CALLS` if the model stopped after tool calls."""
        calls = self._parser is not None and self._parser.calls and self.finish is FinishReason.STOP
        stopped = self._stop_checker is not None and self._stop_checker.stop is not None
        return FinishReason.TOOL_CALLS if calls and not stopped else self.finish

    def _take_text(self) -> str:
        """Removes and returns the text that was not shown yet."""
        text = "".join(self._pending_text)
        self._pending_text.clear()
        return text

    def _segments(self) -> list[AnswerSegment]:
        text = self._take_text()
        if self._parser is None:
            return [AnswerSegment(text=text)] if text else []
        self._parser.push(text)
        if self.finish is not None:
            self._parser.flush()
        return self._parser.take()

    def _append_text(self, text: str) -> bool:
        """Passes text through the stop window; True if a stop string completed."""
        self._text_length += len(text)
        if self._stop_checker is not None and self._passes_thoughts and self._parser is not None:
            text = self._parser.push_thought(text)
        if self._stop_checker is None or self.tokens <= self._min_tokens:
            self._pending_text.append(text)
            return False
        visible, stopped = self._stop_checker.push(text)
        self._pending_text.append(visible)
        return stopped

    def _finish(self, finish: FinishReason) -> None:
        """Handles the end at the replica: flushes held-back text."""
        self.finish = finish
        rest = self._detokenizer.flush()
        if self._parser is not None and self._passes_thoughts:
            rest = self._parser.push_thought(rest, final=True)
            if finish is FinishReason.STOP:
                rest += self._parser.take_unclosed_thought()
        if rest and self._append_text(rest):
            self.finish = FinishReason.STOP
        elif self._stop_checker is not None:
            self._pending_text.append(self._stop_checker.flush())
            if self._parser is not None and not self._passes_thoughts:
                # The stop strings have been looked for in all of it, so what ends the turn is the answer as it is.
                rest = self._parser.push_thought(self._take_text()) + self._parser.push_thought("", final=True)
                if finish is FinishReason.STOP:
                    rest += self._parser.take_unclosed_thought()
                self._pending_text.append(rest)

    def _to_token_score(self, token: int, logprobs: TokenLogprobs) -> TokenScore:
        return TokenScore(
            chosen=self._to_token_logprob(token, logprobs.logprob),
            top=[self._to_token_logprob(other, logprob) for other, logprob in logprobs.top],
            offset=self._text_length,
        )

    def _to_token_logprob(self, token: int, logprob: float) -> TokenLogprob:
        name = f"{TOKEN_ID_PREFIX}{token}" if self._names_token_ids else self._tokenizer.token_text(token)
        return TokenLogprob(name, self._tokenizer.token_bytes(token), logprob)


def _part(index: int, passage: AnswerSegment) -> TextDelta:
    extra: dict[str, Any] = dict.fromkeys(REASONING_FIELDS, passage.thought) if passage.thought else {}
    if passage.calls:
        extra["tool_calls"] = passage.calls
    return TextDelta(index, passage.text, extra=extra or None)


def record_engine_spans(
    timeline: RequestTimeline, index: int, choice: OutputProcessor, delta: TokenDelta, now_s: float
) -> None:
    """Records engine spans from the stats of a delta: queue and prefill with the first delta, decode with the last.

    Args:
        timeline: Has the running attempt span.
        index: Index of the choice among all prompts.
        choice: Output processor of the choice, after this delta.
        delta: A delta with stats.
        now_s: Arrival time of the delta.
    """
    attempt, stats = timeline.running(SpanName.ATTEMPT), delta.stats
    if attempt is None or stats is None:
        return
    for engine in attempt.inside:
        if engine.facts["choice"] == index:
            break
    else:
        engine = _add_engine_span(attempt, index, choice, delta, stats, now_s)
    if delta.finish is None:
        return
    # The last delta also bounds the network time, in case the first delta was read late.
    offset_s = engine.began_s - attempt.began_s
    slack_s = now_s - attempt.began_s - stats.waited_s - stats.prefill_s - stats.decode_s
    began_s = attempt.began_s + max(0.0, min(offset_s, slack_s / 2))
    first_s = _place_children(engine, began_s, stats)
    engine.facts |= {
        "output_tokens": choice.tokens,
        "finish_reason": str(delta.finish),
        "preemptions": stats.preemptions,
        "displaced_s": round(stats.displaced_s, 6),
        "recomputed_tokens": stats.recomputed_tokens,
    }
    if stats.decode_steps:
        decode = TimelineSpan(
            SpanName.DECODE,
            first_s,
            {"steps": stats.decode_steps, "batch": round(stats.decode_batch, 2), "output_tokens": choice.tokens},
        )
        decode.end(first_s + stats.decode_s)
        engine.inside.append(decode)
    engine.end(first_s + stats.decode_s)


def _add_engine_span(
    attempt: TimelineSpan, index: int, choice: OutputProcessor, delta: TokenDelta, stats: SequenceStats, now_s: float
) -> TimelineSpan:
    """Adds the engine span with its queue and prefill spans to the attempt."""
    slack_s = now_s - attempt.began_s - stats.waited_s - stats.prefill_s
    began_s = attempt.began_s + max(0.0, slack_s) / 2
    engine = TimelineSpan(SpanName.ENGINE, began_s, {"choice": index, "replica": attempt.facts["replica"]})
    prefill = {
        "prompt_tokens": choice.prompt_tokens,
        "cached_tokens": delta.cached_tokens,
        "steps": stats.prefill_steps,
        "batch": stats.prefill_batch,
    }
    engine.inside += [
        TimelineSpan(SpanName.ENGINE_QUEUE, began_s, {"waited_ms": delta.waited_ms or {}}),
        TimelineSpan(SpanName.PREFILL, began_s, prefill),
    ]
    _place_children(engine, began_s, stats)
    attempt.inside.append(engine)
    return engine


def _place_children(engine: TimelineSpan, began_s: float, stats: SequenceStats) -> float:
    """Places the queue and prefill spans after the arrival in the engine; returns the time of the first token."""
    waited, prefill = engine.inside
    engine.began_s = waited.began_s = began_s
    waited.ended_s = prefill.began_s = began_s + stats.waited_s
    prefill.ended_s = prefill.began_s + stats.prefill_s
    return prefill.ended_s


class EmbeddingSpans:
    """Recorder of the engine spans of an embedding attempt.

    A request may bring thousands of texts, and the engine reports each. They are recorded together: the wait until the
    first was begun, and the time from then until the last was computed, with other callers' batches in between. As for
    generated tokens, the engine's times are put into the middle of the time between our sending and our receiving.
    """

    def __init__(self) -> None:
        self._texts = self._tokens = self._batches = 0
        self._min_wait_s: float | None = None
        """Shortest wait of a text in the engine."""
        self._max_duration_s = 0.0
        """Longest time from arrival to vector."""
        self._waited_ms: dict[str, float] = {}
        """Longest wait by cause."""

    def on_report(self, delta: TokenDelta, tokens: int) -> None:
        """Adds the stats of one text.

        Args:
            delta: Delta with the vector.
            tokens: Tokens of the text.
        """
        if (stats := delta.stats) is None:
            return
        self._texts += 1
        self._tokens += tokens
        self._batches += stats.prefill_batch
        self._min_wait_s = stats.waited_s if self._min_wait_s is None else min(self._min_wait_s, stats.waited_s)
        self._max_duration_s = max(self._max_duration_s, stats.waited_s + stats.prefill_s)
        for cause, waited_ms in (delta.waited_ms or {}).items():
            self._waited_ms[cause] = max(self._waited_ms.get(cause, 0.0), waited_ms)

    def record(self, attempt: TimelineSpan, now_s: float) -> None:
        """Adds the spans to the attempt; does nothing if the engine sent no stats.

        Args:
            attempt: The running attempt span.
            now_s: Arrival time of the last vector.
        """
        if self._min_wait_s is None:
            return
        began_s = attempt.began_s + max(0.0, now_s - attempt.began_s - self._max_duration_s) / 2
        engine = TimelineSpan(SpanName.ENGINE, began_s, {"replica": attempt.facts["replica"], "texts": self._texts})
        queue_span = TimelineSpan(SpanName.ENGINE_QUEUE, began_s, {"waited_ms": self._waited_ms})
        encode = TimelineSpan(
            SpanName.ENCODE,
            began_s + self._min_wait_s,
            {"prompt_tokens": self._tokens, "batch": round(self._batches / self._texts, 2)},
        )
        ended_s = min(now_s, began_s + self._max_duration_s)
        queue_span.end(encode.began_s)
        encode.end(ended_s)
        engine.end(ended_s)
        engine.inside += [queue_span, encode]
        attempt.inside.append(engine)
