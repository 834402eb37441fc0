"""What requests did, counted from their tallies when they end.

Labels have bounded values: routes and models as *resolved* here, never as the client wrote them.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from maitred.core.answer import Outcome, Tally
from maitred.core.request import Usage

_REQUEST_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LENGTH_BUCKETS_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_STEPS: Mapping[str, str] = {"max_tokens": "shorten"}
"""What was taken from a request -> the step of the degradation ladder that took it, where the two differ."""


class RequestMetrics:
    """Counts ended requests. Implements `maitred.core.answer.Observer`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "maitred_requests", "Requests that ended.", ["route", "outcome", "status"], registry=registry
        )
        self._refused = Counter(
            "maitred_limit_refusals", "Requests that a limit had no room for.", ["limit"], registry=registry
        )
        self._clamped = Counter(
            "maitred_clamped_requests", "Requests whose max_tokens a limit lowered.", registry=registry
        )
        self._degraded = Counter(
            "maitred_degraded_requests", "Requests that got less, so as not to be refused.", ["step"], registry=registry
        )
        self._unhelpful = Counter(
            "maitred_degradation_skips",
            "Steps of a degradation ladder that were no help.",
            ["step", "reason"],
            registry=registry,
        )
        self._stalled = Counter(
            "maitred_stalled_requests",
            "Requests that were ended because their clients had stopped reading.",
            registry=registry,
        )
        self._chosen = Counter(
            "maitred_chosen",
            "Requests whose model was chosen by what their prompts look like.",
            ["name", "model", "reason"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "maitred_fallbacks",
            "Times that a request went on to another model because one had failed it.",
            ["chain", "model"],
            registry=registry,
        )
        self._escalations = Counter(
            "maitred_escalations",
            "Whole answers that failed a check, and whether a larger model's was given instead.",
            ["model", "reason", "result"],
            registry=registry,
        )
        self._hedges = Counter(
            "maitred_hedges",
            "Requests that were sent to a second replica because the first was late, and who answered.",
            ["model", "answered"],
            registry=registry,
        )
        self._recoveries = Counter(
            "maitred_recoveries",
            "Times that a request went on at another replica because its own had failed.",
            ["model"],
            registry=registry,
        )
        self._continued = Counter(
            "maitred_continued",
            "Times that a stream went on at another server by its text.",
            ["model"],
            registry=registry,
        )
        self._duration = Histogram(
            "maitred_request_seconds",
            "From the head of the request to the end of the answer.",
            ["route"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._ttft = Histogram(
            "maitred_ttft_seconds",
            "From the head of the request to its first token.",
            ["model"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._itl = Histogram(
            "maitred_itl_seconds",
            "Between two deliveries of tokens of one choice.",
            ["model"],
            buckets=_ITL_BUCKETS_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "maitred_tpot_seconds",
            "Per output token of a choice behind its first, of one request.",
            ["model"],
            buckets=_ITL_BUCKETS_S,
            registry=registry,
        )
        self._queue = Histogram(
            "maitred_queue_seconds",
            "What a request waited in all, for its turn and for room.",
            ["model"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._prefill = Histogram(
            "maitred_prefill_seconds",
            "From the head of the request to its first token, without what it waited.",
            ["model"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._decode = Histogram(
            "maitred_decode_seconds",
            "From a request's first token to the end of its answer.",
            ["model"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._e2e = Histogram(
            "maitred_e2e_seconds",
            "From the head of a request that got tokens to the end of its answer.",
            ["model"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._prompt_length = Histogram(
            "maitred_request_prompt_tokens",
            "Prompt tokens of one request.",
            ["model"],
            buckets=_LENGTH_BUCKETS_TOKENS,
            registry=registry,
        )
        self._output_length = Histogram(
            "maitred_request_output_tokens",
            "Tokens that one request was answered with.",
            ["model"],
            buckets=_LENGTH_BUCKETS_TOKENS,
            registry=registry,
        )
        self._choices = Counter(
            "maitred_choices", "Choices that came to an end.", ["model", "finish_reason"], registry=registry
        )
        self._prompt = Counter(
            "maitred_prompt_tokens", "Prompt tokens of requests that ran.", ["model"], registry=registry
        )
        self._cached = Counter(
            "maitred_cached_tokens", "Of these, tokens found in the prefix cache.", ["model"], registry=registry
        )
        self._output = Counter("maitred_output_tokens", "Tokens generated for clients.", ["model"], registry=registry)

    def ended(self, tally: Tally) -> None:
        """Counts one."""
        self._requests.labels(tally.route, tally.outcome or Outcome.FAILED, tally.status).inc()
        self._duration.labels(tally.route).observe(tally.ended_s - tally.started_s)
        if tally.refused_by:
            self._refused.labels(tally.refused_by).inc()
        if tally.stalled:
            self._stalled.inc()
        if tally.clamped_max_tokens is not None:
            self._clamped.inc()
        if (chosen := tally.chosen) is not None:
            self._chosen.labels(chosen.name, chosen.model, chosen.reason).inc()
        for fallback in tally.fallbacks:
            self._fallbacks.labels(*fallback.split("=", 1)).inc()
        for failed in tally.failed:
            self._escalations.labels(failed.model, failed.reason, "replaced" if failed.replaced else "given").inc()
            if failed.replaced:
                self._count_tokens(failed.model, failed.usage)
        if tally.hedged:
            self._hedges.labels(tally.model, tally.hedged).inc()
        if tally.recoveries:
            self._recoveries.labels(tally.model).inc(tally.recoveries)
        if tally.continued:
            self._continued.labels(tally.model).inc(tally.continued)
        if tally.first_token_s is None:
            return
        self._time(tally, tally.first_token_s)
        self._count_tokens(tally.model, tally.usage)
        self._prompt_length.labels(tally.model).observe(tally.prompt_tokens)
        self._output_length.labels(tally.model).observe(tally.completion_tokens)
        for reason in tally.finishes:
            self._choices.labels(tally.model, reason).inc()
        for taken in tally.degraded:
            what = taken.partition("=")[0]
            self._degraded.labels(_STEPS.get(what, what)).inc()

    def _time(self, tally: Tally, first_token_s: float) -> None:
        """What a request that got tokens took, whole and in parts."""
        model, queue_s = tally.model, sum(tally.waited_ms.values()) / 1000
        ttft_s, decode_s = first_token_s - tally.started_s, tally.ended_s - first_token_s
        self._ttft.labels(model).observe(ttft_s)
        self._queue.labels(model).observe(queue_s)
        self._prefill.labels(model).observe(max(0.0, ttft_s - queue_s))
        self._decode.labels(model).observe(decode_s)
        self._e2e.labels(model).observe(ttft_s + decode_s)
        choices = max(1, len(tally.finishes))
        if tally.completion_tokens > choices:
            self._tpot.labels(model).observe(decode_s * choices / (tally.completion_tokens - choices))
        itl = self._itl.labels(model)
        for gap_s in tally.gaps_s:
            itl.observe(gap_s)

    def _count_tokens(self, model: str, usage: Usage) -> None:
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._cached.labels(model).inc(usage.cached_tokens)
        self._output.labels(model).inc(usage.completion_tokens)

    def degradation_skipped(self, step: str, reason: str) -> None:
        """Counts a step of a degradation ladder that was no help, and why."""
        self._unhelpful.labels(step, reason).inc()
