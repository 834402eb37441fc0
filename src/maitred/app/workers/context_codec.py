"""The tally of a request on its way from the worker that served it to those who are told of its end."""

from collections.abc import Sequence

from maitred.core.answer import InferenceRequest, RequestContext
from maitred.core.errors import MaitredError
from maitred.core.timeline import RequestTimeline, TimelineSpan
from maitred.wire.error_codec import read_error, write_error
from maitred.wire.worker_protocol import RequestEnded, RequestSummary


def ended_of(tally: RequestContext) -> RequestEnded:
    """What a closed tally tells."""
    assert tally.outcome is not None
    return RequestEnded(
        request_id=tally.request_id,
        started_s=tally.started_s,
        ended_s=tally.ended_s,
        route=tally.route,
        outcome=tally.outcome,
        status=tally.status,
        principal=tally.principal,
        model=tally.model,
        ask=None if tally.ask is None else _written(tally.ask),
        failure=None if tally.failure is None else write_error(tally.failure),
        refused_by=tally.refused_by,
        chosen=tally.chosen,
        clamped_max_tokens=tally.clamped_max_tokens,
        priority=tally.priority,
        forecast=tally.forecast,
        released_s=tally.released_s,
        first_token_s=tally.first_token_s,
        waited_ms=tally.waited_ms,
        degraded=tally.degraded,
        usage=tally.usage,
        gaps_s=tally.gaps_s,
        finishes=tally.finishes,
        fallbacks=tally.fallbacks,
        failed=tally.failed,
        recoveries=tally.recoveries,
        continued=tally.continued,
        stalled=tally.stalled,
        chapters=tally.story.chapters,
        trace=tally.story.trace,
        parent_span_id=tally.story.parent_span_id,
    )


def tally_of(ended: RequestEnded, chapters: Sequence[TimelineSpan]) -> RequestContext:
    """The same tally again, with what the controller itself has to tell of the request."""
    failure: MaitredError | None = None if ended.failure is None else read_error(ended.failure)
    story = RequestTimeline(
        sorted([*ended.chapters, *chapters], key=lambda chapter: chapter.began_s), ended.trace, ended.parent_span_id
    )
    usage = ended.usage
    return RequestContext(
        request_id=ended.request_id,
        started_s=ended.started_s,
        route=ended.route,
        principal=ended.principal,
        model=ended.model,
        chosen=ended.chosen,
        refused_by=ended.refused_by,
        failure=failure,
        clamped_max_tokens=ended.clamped_max_tokens,
        priority=ended.priority,
        forecast=ended.forecast,
        released_s=ended.released_s,
        waited_ms=ended.waited_ms,
        degraded=ended.degraded,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        estimated=usage.estimated,
        first_token_s=ended.first_token_s,
        gaps_s=ended.gaps_s,
        finishes=ended.finishes,
        fallbacks=ended.fallbacks,
        failed=ended.failed,
        recoveries=ended.recoveries,
        continued=ended.continued,
        outcome=ended.outcome,
        stalled=ended.stalled,
        status=ended.status,
        ended_s=ended.ended_s,
        ask=None if ended.ask is None else _read(ended.ask),
        story=story,
    )


def _written(ask: InferenceRequest) -> RequestSummary:
    return RequestSummary(
        ask.model,
        ask.sampling,
        ask.max_tokens,
        ask.seed,
        ask.left_open,
        ask.stops,
        ask.priority,
        ask.ttft_in_s,
        ask.itl_objective_s,
        ask.deadline_in_s,
        ask.needs,
        ask.whole,
    )


def _read(written: RequestSummary) -> InferenceRequest:
    return InferenceRequest(
        model=written.model,
        prompts=[],
        sampling=written.sampling,
        max_tokens=written.max_tokens,
        seed=written.seed,
        left_open=written.left_open,
        stops=written.stops,
        priority=written.priority,
        ttft_in_s=written.ttft_in_s,
        itl_objective_s=written.itl_objective_s,
        deadline_in_s=written.deadline_in_s,
        needs=written.needs,
        whole=written.whole,
    )
