"""Encodes the context of a request, which a worker sends to the observers in the controller when the request ends."""

from collections.abc import Sequence

from maitred.core.context import RequestContext
from maitred.core.errors import MaitredError
from maitred.core.inference import InferenceRequest
from maitred.core.timeline import RequestTimeline, TimelineSpan
from maitred.wire.error_codec import decode_error, encode_error
from maitred.wire.worker_protocol import RequestEnded, RequestSummary


def encode_context(context: RequestContext) -> RequestEnded:
    """Encodes a closed request context as the message that reports the end of the request."""
    assert context.outcome is not None
    return RequestEnded(
        request_id=context.request_id,
        started_s=context.started_s,
        ended_s=context.ended_s,
        route=context.route,
        outcome=context.outcome,
        status=context.status,
        principal=context.principal,
        model=context.model,
        request=None if context.request is None else _summarize_request(context.request),
        failure=None if context.failure is None else encode_error(context.failure),
        refused_by=context.refused_by,
        selection=context.selection,
        clamped_max_tokens=context.clamped_max_tokens,
        priority=context.priority,
        predicted_position=context.predicted_position,
        dispatched_s=context.dispatched_s,
        first_token_s=context.first_token_s,
        waited_ms=context.waited_ms,
        degraded=context.degraded,
        usage=context.usage,
        paid_tokens=context.paid_tokens,
        gaps_s=context.gaps_s,
        finish_reasons=context.finish_reasons,
        fallbacks=context.fallbacks,
        rejected_answers=context.rejected_answers,
        recoveries=context.recoveries,
        continued=context.continued,
        cache=context.cache,
        stalled=context.stalled,
        spans=context.timeline.spans,
        trace=context.timeline.trace,
        parent_span_id=context.timeline.parent_span_id,
    )


def decode_context(ended: RequestEnded, spans: Sequence[TimelineSpan]) -> RequestContext:
    """Decodes a request context, and adds the spans that the controller itself has recorded of the request."""
    failure: MaitredError | None = None if ended.failure is None else decode_error(ended.failure)
    timeline = RequestTimeline(
        sorted([*ended.spans, *spans], key=lambda span: span.began_s), ended.trace, ended.parent_span_id
    )
    usage = ended.usage
    return RequestContext(
        request_id=ended.request_id,
        started_s=ended.started_s,
        route=ended.route,
        principal=ended.principal,
        model=ended.model,
        selection=ended.selection,
        refused_by=ended.refused_by,
        failure=failure,
        clamped_max_tokens=ended.clamped_max_tokens,
        priority=ended.priority,
        predicted_position=ended.predicted_position,
        dispatched_s=ended.dispatched_s,
        waited_ms=ended.waited_ms,
        degraded=ended.degraded,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        cache_write_1h_tokens=usage.cache_write_1h_tokens,
        estimated=usage.estimated,
        paid_tokens=ended.paid_tokens,
        first_token_s=ended.first_token_s,
        gaps_s=ended.gaps_s,
        finish_reasons=ended.finish_reasons,
        fallbacks=ended.fallbacks,
        rejected_answers=ended.rejected_answers,
        recoveries=ended.recoveries,
        continued=ended.continued,
        cache=ended.cache,
        outcome=ended.outcome,
        stalled=ended.stalled,
        status=ended.status,
        ended_s=ended.ended_s,
        request=None if ended.request is None else _restore_request(ended.request),
        timeline=timeline,
    )


def _summarize_request(request: InferenceRequest) -> RequestSummary:
    return RequestSummary(
        model=request.model,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        seed=request.seed,
        unset_fields=request.unset_fields,
        stops=request.stops,
        priority=request.priority,
        ttft_in_s=request.ttft_in_s,
        itl_objective_s=request.itl_objective_s,
        deadline_in_s=request.deadline_in_s,
        needs=request.needs,
        whole=request.whole,
    )


def _restore_request(summary: RequestSummary) -> InferenceRequest:
    return InferenceRequest(
        model=summary.model,
        prompts=[],
        sampling=summary.sampling,
        max_tokens=summary.max_tokens,
        seed=summary.seed,
        unset_fields=summary.unset_fields,
        stops=summary.stops,
        priority=summary.priority,
        ttft_in_s=summary.ttft_in_s,
        itl_objective_s=summary.itl_objective_s,
        deadline_in_s=summary.deadline_in_s,
        needs=summary.needs,
        whole=summary.whole,
    )
