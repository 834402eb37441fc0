"""What tenants do, with a bound on how many are told apart.

A series for each of ten thousand tenants would make every scrape slow and every dashboard useless. The organisations
that come first are named, as many as `metrics.tenants` says, and the others are counted together under `OTHER`. Which
are named does not change while the process lives, so every counter only grows; who used what exactly is in the ledger.
"""

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Summary

from maitred.core.answer import Outcome, Tally

OTHER = "other"


class Named:
    """Who has a name in the metrics: those that come first.

    Args:
        most: How many.

    Attributes:
        names: They, in the order in which they came.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.names: dict[str, None] = {}

    def adopt(self, most: int) -> None:
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
    """Counts ended requests by organisation. Implements `maitred.core.answer.Observer`.

    Args:
        registry: Where the metrics are shown.
        named: How many organisations are told apart.

    Attributes:
        named: Those that are.
    """

    def __init__(self, registry: CollectorRegistry, named: int) -> None:
        self.named = Named(named)
        requests = Counter(
            "maitred_tenant_requests", "Requests of an organisation.", ["tenant", "outcome"], registry=registry
        )
        prompt = Counter(
            "maitred_tenant_prompt_tokens", "Prompt tokens of an organisation.", ["tenant"], registry=registry
        )
        output = Counter(
            "maitred_tenant_output_tokens", "Tokens generated for an organisation.", ["tenant"], registry=registry
        )
        ttft = Summary(
            "maitred_tenant_ttft_seconds",
            "From the head of a request to its first token, by organisation.",
            ["tenant"],
            registry=registry,
        )
        queue = Summary(
            "maitred_tenant_queue_seconds", "What a request that got tokens had waited.", ["tenant"], registry=registry
        )
        self._requests, self._prompt, self._output = cache(requests.labels), cache(prompt.labels), cache(output.labels)
        self._ttft, self._queue = cache(ttft.labels), cache(queue.labels)

    def ended(self, tally: Tally) -> None:
        """Counts one, if it is known whose it is and it asked for work."""
        if tally.principal is None or not tally.model:
            return
        tenant = self.named.label(tally.principal.tenants[-1])
        self._requests(tenant, tally.outcome or Outcome.FAILED).inc()
        if tally.first_token_s is None:
            return
        usage = tally.usage
        self._prompt(tenant).inc(usage.prompt_tokens)
        self._output(tenant).inc(usage.completion_tokens)
        self._ttft(tenant).observe(tally.first_token_s - tally.started_s)
        self._queue(tenant).observe(sum(tally.waited_ms.values()) / 1000)
