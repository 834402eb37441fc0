"""Engine timings of a choice, recorded as spans of the request's timeline.

The engine counts seconds on a clock of its own, which may be that of another machine. What it says took place between
our sending the request and our hearing of it, so it is put into the middle of that time: off by at most half of what
the messages took, and no two machines need to agree on the time.
"""

from maitred.app.request.output import OutputProcessor
from maitred.core.request import SequenceStats, TokenDelta
from maitred.core.timeline import RequestTimeline, SpanName, TimelineSpan


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
    engine = next((one for one in attempt.inside if one.facts["choice"] == index), None)
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
