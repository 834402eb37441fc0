"""What requests did, counted from their tallies when they end.

Labels have bounded values: routes and models as *resolved* here, never as the client wrote them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram

from maitred.core.answer import Outcome, Tally
from maitred.core.request import Usage
from maitred.observe.distributions import Distributions

_REQUEST_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LENGTH_BUCKETS_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)
_STEPS: Mapping[str, str] = {"max_tokens": "shorten"}
"""What was taken from a request -> the step of the degradation ladder that took it, where the two differ."""

_COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "maitred_requests": ("Requests that ended.", ("route", "outcome", "status")),
    "maitred_model_requests": (
        "Requests that ended, of which it was known which model they are for.",
        ("model", "class", "outcome"),
    ),
    "maitred_errors": ("Requests that were answered with an error, refusals included.", ("model", "code")),
    "maitred_limit_refusals": ("Requests that a limit had no room for.", ("limit",)),
    "maitred_clamped_requests": ("Requests whose max_tokens a limit lowered.", ()),
    "maitred_degraded_requests": ("Requests that got less, so as not to be refused.", ("step",)),
    "maitred_degradation_skips": ("Steps of a degradation ladder that were no help.", ("step", "reason")),
    "maitred_stalled_requests": ("Requests that were ended because their clients had stopped reading.", ()),
    "maitred_chosen": (
        "Requests whose model was chosen by what their prompts look like.",
        ("name", "model", "reason"),
    ),
    "maitred_fallbacks": (
        "Times that a request went on to another model because one had failed it.",
        ("chain", "model"),
    ),
    "maitred_escalations": (
        "Whole answers that failed a check, and whether a larger model's was given instead.",
        ("model", "reason", "result"),
    ),
    "maitred_hedges": (
        "Requests that were sent to a second replica because the first was late, and who answered.",
        ("model", "answered"),
    ),
    "maitred_recoveries": (
        "Times that a request went on at another replica because its own had failed.",
        ("model",),
    ),
    "maitred_continued": ("Times that a stream went on at another server by its text.", ("model",)),
    "maitred_choices": ("Choices that came to an end.", ("model", "finish_reason")),
    "maitred_prompt_tokens": ("Prompt tokens of requests that ran.", ("model",)),
    "maitred_cached_tokens": ("Of these, tokens found in the prefix cache.", ("model",)),
    "maitred_output_tokens": ("Tokens generated for clients.", ("model",)),
}
_BY_MODEL: Mapping[str, tuple[str, Sequence[float]]] = {
    "maitred_ttft_seconds": ("From the head of the request to its first token.", _TTFT_BUCKETS_S),
    "maitred_itl_seconds": ("Between two deliveries of tokens of one choice.", _ITL_BUCKETS_S),
    "maitred_tpot_seconds": ("Per output token of a choice behind its first, of one request.", _ITL_BUCKETS_S),
    "maitred_queue_seconds": ("What a request waited in all, for its turn and for room.", _TTFT_BUCKETS_S),
    "maitred_prefill_seconds": (
        "From the head of the request to its first token, without what it waited.",
        _TTFT_BUCKETS_S,
    ),
    "maitred_decode_seconds": ("From a request's first token to the end of its answer.", _REQUEST_BUCKETS_S),
    "maitred_inference_seconds": ("Prefill and decode of a request together.", _REQUEST_BUCKETS_S),
    "maitred_e2e_seconds": (
        "From the head of a request that got tokens to the end of its answer.",
        _REQUEST_BUCKETS_S,
    ),
    "maitred_request_prompt_tokens": ("Prompt tokens of one request.", _LENGTH_BUCKETS_TOKENS),
    "maitred_request_computed_tokens": (
        "Prompt tokens of one request that were not found in the prefix cache.",
        _LENGTH_BUCKETS_TOKENS,
    ),
    "maitred_request_max_tokens": ("The max_tokens of requests that named one.", _LENGTH_BUCKETS_TOKENS),
    "maitred_request_choices": ("Choices that a request asked for, of each of its prompts.", _CHOICES),
    "maitred_request_output_tokens": ("Tokens that one request was answered with.", _LENGTH_BUCKETS_TOKENS),
}
"""Histograms of requests that got tokens."""


class RequestMetrics:
    """Counts ended requests. Implements `maitred.core.answer.Observer`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counters = {name: Counter(name, text, labels, registry=registry) for name, (text, labels) in _COUNTERS.items()}
        durations = Histogram(
            "maitred_request_seconds",
            "From the head of the request to the end of the answer.",
            ["route"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        by_model = Distributions(_BY_MODEL, "model")
        registry.register(by_model)
        # The library takes a lock and makes a string of every label to find a series, thirty times for each request.
        self._counter = cache(lambda name, *labels: counters[name].labels(*labels) if labels else counters[name])
        self._duration = cache(durations.labels)
        self._of_model = by_model.of

    def ended(self, tally: Tally) -> None:
        """Counts one."""
        model, outcome, count = tally.model, tally.outcome or Outcome.FAILED, self._count
        count("maitred_requests", tally.route, outcome, tally.status)
        self._duration(tally.route).observe(tally.ended_s - tally.started_s)
        if model:
            count("maitred_model_requests", model, tally.priority or "", outcome)
        if tally.error:
            count("maitred_errors", model, tally.error)
        if tally.refused_by:
            count("maitred_limit_refusals", tally.refused_by)
        if tally.stalled:
            count("maitred_stalled_requests")
        if tally.clamped_max_tokens is not None:
            count("maitred_clamped_requests")
        if (chosen := tally.chosen) is not None:
            count("maitred_chosen", chosen.name, chosen.model, chosen.reason)
        for fallback in tally.fallbacks:
            count("maitred_fallbacks", *fallback.split("=", 1))
        for failed in tally.failed:
            count("maitred_escalations", failed.model, failed.reason, "replaced" if failed.replaced else "given")
            if failed.replaced:
                self._count_tokens(failed.model, failed.usage)
        if tally.hedged:
            count("maitred_hedges", model, tally.hedged)
        if tally.recoveries:
            count("maitred_recoveries", model, by=tally.recoveries)
        if tally.continued:
            count("maitred_continued", model, by=tally.continued)
        if tally.first_token_s is None:
            return
        for name, value in _measured(tally, tally.first_token_s):
            self._of_model(name, model).add(value)
        self._of_model("maitred_itl_seconds", model).add(*tally.gaps_s)
        self._count_tokens(model, tally.usage)
        for reason in tally.finishes:
            count("maitred_choices", model, reason)
        for taken in tally.degraded:
            what = taken.partition("=")[0]
            count("maitred_degraded_requests", _STEPS.get(what, what))

    def degradation_skipped(self, step: str, reason: str) -> None:
        """Counts a step of a degradation ladder that was no help, and why."""
        self._count("maitred_degradation_skips", step, reason)

    def _count(self, name: str, *labels: Hashable, by: int = 1) -> None:
        self._counter(name, *labels).inc(by)

    def _count_tokens(self, model: str, usage: Usage) -> None:
        self._count("maitred_prompt_tokens", model, by=usage.prompt_tokens)
        self._count("maitred_cached_tokens", model, by=usage.cached_tokens)
        self._count("maitred_output_tokens", model, by=usage.completion_tokens)


def _measured(tally: Tally, first_token_s: float) -> Iterator[tuple[str, float]]:
    """What a request that got tokens took, whole and in parts, and how long it was: histogram and value."""
    queue_s = sum(tally.waited_ms.values()) / 1000
    ttft_s, decode_s = first_token_s - tally.started_s, tally.ended_s - first_token_s
    prefill_s = max(0.0, ttft_s - queue_s)
    yield "maitred_ttft_seconds", ttft_s
    yield "maitred_queue_seconds", queue_s
    yield "maitred_prefill_seconds", prefill_s
    yield "maitred_decode_seconds", decode_s
    yield "maitred_inference_seconds", prefill_s + decode_s
    yield "maitred_e2e_seconds", ttft_s + decode_s
    choices = max(1, len(tally.finishes))
    if tally.completion_tokens > choices:
        yield "maitred_tpot_seconds", decode_s * choices / (tally.completion_tokens - choices)
    yield "maitred_request_prompt_tokens", tally.prompt_tokens
    yield "maitred_request_computed_tokens", tally.prompt_tokens - tally.cached_tokens
    yield "maitred_request_output_tokens", tally.completion_tokens
    if tally.ask is not None:
        yield "maitred_request_choices", tally.ask.sampling.n
        if tally.ask.max_tokens is not None:
            yield "maitred_request_max_tokens", tally.ask.max_tokens
