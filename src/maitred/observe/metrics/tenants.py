"""Metrics of tenants, with a bound on how many have series of their own.

A series for each of ten thousand tenants would make every scrape slow and every dashboard useless. The organisations
that come first are named, as many as `metrics.tenants` says, and the others are counted together under `OTHER`. The
named ones do not change while the process lives, so every counter only grows; exact usage by tenant is in the ledger.
"""

from collections import Counter as Tallied
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter

from maitred.core.answer import Outcome, RequestContext
from maitred.observe.metrics.distributions import LabelledSummaries

OTHER = "other"
_TIME_SUMMARIES: Mapping[str, str] = {
    "maitred_tenant_ttft_seconds": "From the head of a request to its first token, by organisation.",
    "maitred_tenant_queue_seconds": "What a request that got tokens had waited.",
}


class LabelCap:
    """Bounded set of tenants that are label values: those that come first.

    Args:
        max_names: How many.

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
    """Metrics of ended requests by organisation. Implements `maitred.core.answer.RequestObserver`.

    Args:
        registry: Registry of the metrics.
        max_named: How many organisations have series of their own.

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
            served = [ctx for ctx in tenant_contexts if ctx.first_token_s is not None]
            if served:
                self._observe_tenant(tenant, served)

    def _observe_tenant(self, tenant: str, contexts: Sequence[RequestContext]) -> None:
        """Observes tokens and waiting times of one tenant's requests that got tokens."""
        self._prompt(tenant).inc(sum([context.prompt_tokens for context in contexts]))
        self._output(tenant).inc(sum([context.completion_tokens for context in contexts]))
        ttft_s = [(context.first_token_s or 0.0) - context.started_s for context in contexts]
        waited_s = [sum(context.waited_ms.values()) / 1000 if context.waited_ms else 0.0 for context in contexts]
        self._times.add("maitred_tenant_ttft_seconds", tenant, ttft_s)
        self._times.add("maitred_tenant_queue_seconds", tenant, waited_s)
