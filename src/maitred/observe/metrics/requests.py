"""Metrics of requests and of tenants, counted from the contexts of requests when they end.

Labels have bounded values: routes and models as *resolved* here, never as the client wrote them.

A series for each of ten thousand tenants would make every scrape slow and every dashboard useless. The first
organisations get names, as many as `metrics.tenants` says, and the others are counted together under `OTHER`. The named
ones do not change while the process lives, so every counter only grows; exact usage by tenant is in the ledger.
"""

from collections import Counter as Tallied
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from operator import add

from prometheus_client import CollectorRegistry, Counter

from maitred.core.context import Outcome, RequestContext
from maitred.core.request import Usage
from maitred.observe.metrics.distributions import LabelledHistograms, LabelledSummaries

_REQUEST_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LENGTH_BUCKETS_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)
_DEGRADATION_STEPS: Mapping[str, str] = {"max_tokens": "shorten"}
"""Degradation of a request -> the step of the ladder that caused it, where the two differ."""

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
    "maitred_compactions": ("Conversations that were summarised before an answer.", ("model",)),
    "maitred_hedges": (
        "Requests that were sent to a second replica because the first was late, and who answered.",
        ("model", "answered"),
    ),
    "maitred_recoveries": (
        "Times that a request went on at another replica because its own had failed.",
        ("model",),
    ),
    "maitred_continued": ("Times that a stream went on at another server by its text.", ("model",)),
    "maitred_cache_lookups": ("Requests that a cache of answers could serve, and what it did.", ("model", "result")),
    "maitred_cache_saved_tokens": ("Tokens of answers that were not computed for their requests.", ("model",)),
    "maitred_choices": ("Choices that came to an end.", ("model", "finish_reason")),
    "maitred_prompt_tokens": ("Prompt tokens of requests that ran.", ("model",)),
    "maitred_cached_tokens": ("Of these, tokens found in the prefix cache.", ("model",)),
    "maitred_output_tokens": ("Tokens generated for clients.", ("model",)),
}
_BY_ROUTE: Mapping[str, tuple[str, Sequence[float]]] = {
    "maitred_request_seconds": ("From the head of the request to the end of the answer.", _REQUEST_BUCKETS_S),
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
    """Metrics of ended requests. Implements `maitred.core.context.RequestObserver`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counters = {name: Counter(name, text, labels, registry=registry) for name, (text, labels) in _COUNTERS.items()}
        by_route, by_model = LabelledHistograms(_BY_ROUTE, "route"), LabelledHistograms(_BY_MODEL, "model")
        registry.register(by_route)
        registry.register(by_model)
        # Cached: the library takes a lock and makes a string of every label to find a series.
        self._counter = cache(lambda name, *labels: counters[name].labels(*labels) if labels else counters[name])
        self._route_series = by_route.series
        self._model_series = by_model.series

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Counts ended requests: first in groups of equal labels, then incidents one by one."""
        request_counts = Tallied([(ctx.route, ctx.outcome or Outcome.FAILED, ctx.status) for ctx in contexts])
        for (route, outcome, status), count in request_counts.items():
            self._count("maitred_requests", route, outcome, status, by=count)
        model_counts = Tallied(
            [(ctx.model, ctx.priority or "", ctx.outcome or Outcome.FAILED) for ctx in contexts if ctx.model]
        )
        for labels, count in model_counts.items():
            self._count("maitred_model_requests", *labels, by=count)
        for route in {route for route, _, _ in request_counts}:
            durations_s = [ctx.ended_s - ctx.started_s for ctx in contexts if ctx.route == route]
            self._route_series("maitred_request_seconds", route).add(durations_s)
        served = [ctx for ctx in contexts if ctx.first_token_s is not None and ctx.is_computed]
        for model in dict.fromkeys(ctx.model for ctx in served):
            self._observe_model(model, [ctx for ctx in served if ctx.model == model])
        look_ups = Tallied([(ctx.model, ctx.cache.status) for ctx in contexts if ctx.cache is not None])
        for (model, result), count in look_ups.items():
            self._count("maitred_cache_lookups", model, result, by=count)
        for context in contexts:
            self._count_incidents(context)

    def on_degradation_skipped(self, step: str, reason: str) -> None:
        """Counts a step of a degradation ladder that did not help, and why."""
        self._count("maitred_degradation_skips", step, reason)

    def _observe_model(self, model: str, contexts: Sequence[RequestContext]) -> None:
        """Observes latencies and lengths of one model's requests that got tokens."""
        for name, values in _histogram_values(contexts).items():
            if values:
                self._model_series(name, model).add(values)
        self._model_series("maitred_itl_seconds", model).add(
            [gap_s for context in contexts for gap_s in context.gaps_s]
        )
        self._count(
            "maitred_prompt_tokens",
            model,
            by=sum([context.prompt_tokens - context.saved_prompt_tokens for context in contexts]),
        )
        self._count("maitred_cached_tokens", model, by=sum([context.cached_tokens for context in contexts]))
        self._count("maitred_output_tokens", model, by=sum([context.completion_tokens for context in contexts]))
        for reason, count in Tallied([reason for context in contexts for reason in context.finish_reasons]).items():
            self._count("maitred_choices", model, reason, by=count)

    def _count_incidents(self, context: RequestContext) -> None:
        """Counts rare events of one request, such as errors and fallbacks."""
        model = context.model
        if context.failure is not None:
            self._count("maitred_errors", model, context.failure.code)
        if context.refused_by:
            self._count("maitred_limit_refusals", context.refused_by)
        if context.stalled:
            self._count("maitred_stalled_requests")
        if context.clamped_max_tokens is not None:
            self._count("maitred_clamped_requests")
        if (selection := context.selection) is not None:
            self._count("maitred_chosen", selection.name, selection.model, selection.reason)
        for fallback in context.fallbacks:
            self._count("maitred_fallbacks", *fallback.split("=", 1))
        for rejected in context.rejected_answers:
            self._count(
                "maitred_escalations", rejected.model, rejected.reason, "replaced" if rejected.replaced else "given"
            )
            if rejected.replaced:
                self._count_tokens(rejected.model, rejected.usage)
        if (compaction := context.compaction) is not None:
            self._count("maitred_compactions", compaction.model)
            self._count_tokens(compaction.model, compaction.usage)
        if context.cache is not None and (saved_tokens := context.saved_tokens):
            self._count("maitred_cache_saved_tokens", model, by=saved_tokens)
        if context.hedged:
            self._count("maitred_hedges", model, context.hedged)
        if context.recoveries:
            self._count("maitred_recoveries", model, by=context.recoveries)
        if context.continued:
            self._count("maitred_continued", model, by=context.continued)
        if context.first_token_s is not None:
            for degradation in context.degraded:
                step = degradation.partition("=")[0]
                self._count("maitred_degraded_requests", _DEGRADATION_STEPS.get(step, step))

    def _count(self, name: str, *labels: Hashable, by: int = 1) -> None:
        self._counter(name, *labels).inc(by)

    def _count_tokens(self, model: str, usage: Usage) -> None:
        self._count("maitred_prompt_tokens", model, by=usage.prompt_tokens)
        self._count("maitred_cached_tokens", model, by=usage.cached_tokens)
        self._count("maitred_output_tokens", model, by=usage.completion_tokens)


def _histogram_values(contexts: Sequence[RequestContext]) -> Mapping[str, Sequence[float]]:
    """Returns the values of requests that got tokens, by histogram."""
    ttft_s = [(context.first_token_s or 0.0) - context.started_s for context in contexts]
    decode_s = [context.ended_s - (context.first_token_s or 0.0) for context in contexts]
    queue_s = [sum(context.waited_ms.values()) / 1000 if context.waited_ms else 0.0 for context in contexts]
    prefill_s = [
        max(0.0, first_token_after_s - waited_s) for first_token_after_s, waited_s in zip(ttft_s, queue_s, strict=True)
    ]
    requests = [context.request for context in contexts if context.request is not None]
    return {
        "maitred_ttft_seconds": ttft_s,
        "maitred_tpot_seconds": [
            decode_time_s * choices / (context.completion_tokens - choices)
            for context, decode_time_s in zip(contexts, decode_s, strict=True)
            if context.completion_tokens > (choices := max(1, len(context.finish_reasons)))
        ],
        "maitred_queue_seconds": queue_s,
        "maitred_prefill_seconds": prefill_s,
        "maitred_decode_seconds": decode_s,
        "maitred_inference_seconds": [*map(add, prefill_s, decode_s)],
        "maitred_e2e_seconds": [*map(add, ttft_s, decode_s)],
        "maitred_request_prompt_tokens": [context.prompt_tokens for context in contexts],
        "maitred_request_computed_tokens": [
            context.prompt_tokens - context.saved_prompt_tokens - context.cached_tokens for context in contexts
        ],
        "maitred_request_max_tokens": [request.max_tokens for request in requests if request.max_tokens is not None],
        "maitred_request_choices": [request.sampling.n for request in requests],
        "maitred_request_output_tokens": [context.completion_tokens for context in contexts],
    }


OTHER = "other"
_TIME_SUMMARIES: Mapping[str, str] = {
    "maitred_tenant_ttft_seconds": "From the head of a request to its first token, by organisation.",
    "maitred_tenant_queue_seconds": "What a request that got tokens had waited.",
}


class LabelCap:
    """Bounded set of tenants that are label values: the first ones that occur.

    Args:
        max_names: Largest number of names.

    Attributes:
        names: The tenants, in the order in which they came.
    """

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self.names: dict[str, None] = {}

    def reconfigure(self, max_names: int) -> None:
        """Changes the bound. Tenants with a name keep it, as their counters must not go back."""
        self._max_names = max_names

    def label(self, tenant: str) -> str:
        """Returns the tenant's label value: its name, or `OTHER`."""
        if tenant not in self.names:
            if len(self.names) >= self._max_names:
                return OTHER
            self.names[tenant] = None
        return tenant


class TenantMetrics:
    """Metrics of ended requests by organisation. Implements `maitred.core.context.RequestObserver`.

    Args:
        registry: Registry of the metrics.
        max_named: Largest number of organisations with series of their own.

    Attributes:
        tenant_labels: Organisations that have series of their own.
    """

    def __init__(self, registry: CollectorRegistry, max_named: int) -> None:
        self.tenant_labels = LabelCap(max_named)
        requests = Counter(
            "maitred_tenant_requests", "Requests of an organisation.", ["tenant", "outcome"], registry=registry
        )
        prompt = Counter(
            "maitred_tenant_prompt_tokens", "Prompt tokens of an organisation.", ["tenant"], registry=registry
        )
        output = Counter(
            "maitred_tenant_output_tokens", "Tokens generated for an organisation.", ["tenant"], registry=registry
        )
        self._requests, self._prompt, self._output = cache(requests.labels), cache(prompt.labels), cache(output.labels)
        self._times = LabelledSummaries(_TIME_SUMMARIES, "tenant")
        registry.register(self._times)

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Counts ended requests of known callers that asked for a model."""
        by_tenant: defaultdict[str, list[RequestContext]] = defaultdict(list)
        for context in contexts:
            if context.principal is not None and context.model:
                by_tenant[self.tenant_labels.label(context.principal.tenants[-1])].append(context)
        for tenant, tenant_contexts in by_tenant.items():
            for outcome, count in Tallied([ctx.outcome or Outcome.FAILED for ctx in tenant_contexts]).items():
                self._requests(tenant, outcome).inc(count)
            served = [ctx for ctx in tenant_contexts if ctx.first_token_s is not None and ctx.is_computed]
            if served:
                self._observe_tenant(tenant, served)

    def _observe_tenant(self, tenant: str, contexts: Sequence[RequestContext]) -> None:
        """Observes tokens and waiting times of one tenant's requests that got tokens."""
        self._prompt(tenant).inc(sum([context.prompt_tokens - context.saved_prompt_tokens for context in contexts]))
        self._output(tenant).inc(sum([context.completion_tokens for context in contexts]))
        ttft_s = [(context.first_token_s or 0.0) - context.started_s for context in contexts]
        waited_s = [sum(context.waited_ms.values()) / 1000 if context.waited_ms else 0.0 for context in contexts]
        self._times.add("maitred_tenant_ttft_seconds", tenant, ttft_s)
        self._times.add("maitred_tenant_queue_seconds", tenant, waited_s)
