"""What tenants do, with a bound on how many are told apart.

A series for each of ten thousand tenants would make every scrape slow and every dashboard useless. The organisations
that come first are named, as many as `metrics.tenants` says, and the others are counted together under `OTHER`. Which
are named does not change while the process lives, so every counter only grows; who used what exactly is in the ledger.
"""

from collections import Counter as Tallied
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter

from maitred.core.answer import Outcome, RequestContext
from maitred.observe.metrics.distributions import LabelledSummaries

OTHER = "other"
_TIMES: Mapping[str, str] = {
    "maitred_tenant_ttft_seconds": "From the head of a request to its first token, by organisation.",
    "maitred_tenant_queue_seconds": "What a request that got tokens had waited.",
}


class LabelCap:
    """Who has a name in the metrics: those that come first.

    Args:
        most: How many.

    Attributes:
        names: They, in the order in which they came.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.names: dict[str, None] = {}

    def reconfigure(self, most: int) -> None:
        """Names so many from now on. Who has a name keeps it, as its counters must not go back."""
        self._most = most

    def label(self, tenant: str) -> str:
        """The tenant's name, or `OTHER`."""
        if tenant not in self.names:
            if len(self.names) >= self._most:
                return OTHER
            self.names[tenant] = None
        return tenant


class TenantMetrics:
    """Counts ended requests by organisation. Implements `maitred.core.answer.RequestObserver`.

    Args:
        registry: Where the metrics are shown.
        named: How many organisations are told apart.

    Attributes:
        named: Those that are.
    """

    def __init__(self, registry: CollectorRegistry, named: int) -> None:
        self.named = LabelCap(named)
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
        self._times = LabelledSummaries(_TIMES, "tenant")
        registry.register(self._times)

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Counts those of which it is known whose they are, and that asked for work."""
        of: defaultdict[str, list[RequestContext]] = defaultdict(list)
        for context in contexts:
            if context.principal is not None and context.model:
                of[self.named.label(context.principal.tenants[-1])].append(context)
        for tenant, theirs in of.items():
            for outcome, number in Tallied([each.outcome or Outcome.FAILED for each in theirs]).items():
                self._requests(tenant, outcome).inc(number)
            served = [each for each in theirs if each.first_token_s is not None]
            if served:
                self._measure(tenant, served)

    def _measure(self, tenant: str, contexts: Sequence[RequestContext]) -> None:
        """What those got that got tokens, and how long they waited."""
        self._prompt(tenant).inc(sum([each.prompt_tokens for each in contexts]))
        self._output(tenant).inc(sum([each.completion_tokens for each in contexts]))
        ttft_s = [(each.first_token_s or 0.0) - each.started_s for each in contexts]
        waited_s = [sum(each.waited_ms.values()) / 1000 if each.waited_ms else 0.0 for each in contexts]
        self._times.add("maitred_tenant_ttft_seconds", tenant, ttft_s)
        self._times.add("maitred_tenant_queue_seconds", tenant, waited_s)
