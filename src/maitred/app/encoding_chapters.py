"""What an encoder of ours says of the texts of one attempt, as chapters of the request's story.

A request may bring thousands of texts, and the engine tells of each. They are told together: the wait until the first
was begun, and the time from then until the last was computed, with other callers' batches in between. As with
`engine_chapters`, what the engine has timed is put into the middle of the time between our sending and our hearing.
"""

from maitred.core.request import TokenDelta
from maitred.core.timeline import SpanName, TimelineSpan


class EncodingSpans:
    """The texts of one attempt."""

    def __init__(self) -> None:
        self._texts = self._tokens = self._batches = 0
        self._begun_s: float | None = None
        """From a text's arrival in the engine to its batch, for the one that waited least."""
        self._done_s = 0.0
        """From a text's arrival to its vector, for the last one."""
        self._waited_ms: dict[str, float] = {}
        """By cause, the longest."""

    def heard(self, delta: TokenDelta, tokens: int) -> None:
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

    def tell(self, attempt: TimelineSpan, now_s: float) -> None:
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
