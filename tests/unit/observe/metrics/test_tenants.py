"""Tenants have their own series, up to a bound."""

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from maitred.core.context import Outcome, RequestContext
from maitred.core.tenancy import Principal
from maitred.observe.config import MetricsConfig
from maitred.observe.metrics.registry import Metrics
from maitred.observe.metrics.requests import TenantMetrics


def ended(organisation, *, model="m", outcome=Outcome.FINISHED, tokens=3):
    principal = Principal(key="k", tenants=("team", organisation), scopes=frozenset())
    context = RequestContext("req-1", 0.0, route="/v1/completions", model=model, principal=principal)
    if outcome is Outcome.FINISHED:
        context.first_token_s, context.prompt_tokens, context.completion_tokens = 2.0, 10, tokens
        context.waited_ms = {"slots": 500.0}
    context.close(outcome, 200 if outcome is Outcome.FINISHED else 429, 5.0)
    return context


def counted(named, *contexts):
    registry = CollectorRegistry()
    tenants = TenantMetrics(registry, named)
    for context in contexts:
        tenants.on_request_end(context)
    return registry.get_sample_value


def test_requests_and_tokens_count_for_the_organisation():
    value = counted(10, ended("a"), ended("a", outcome=Outcome.REFUSED), ended("b", tokens=7))
    assert value("maitred_tenant_requests_total", {"tenant": "a", "outcome": "finished"}) == 1
    assert value("maitred_tenant_requests_total", {"tenant": "a", "outcome": "refused"}) == 1
    assert value("maitred_tenant_output_tokens_total", {"tenant": "b"}) == 7
    assert value("maitred_tenant_prompt_tokens_total", {"tenant": "a"}) == 10
    assert value("maitred_tenant_ttft_seconds_sum", {"tenant": "a"}) == 2.0
    assert value("maitred_tenant_queue_seconds_sum", {"tenant": "b"}) == 0.5


def test_those_that_come_late_are_counted_together_and_nobody_changes_sides():
    value = counted(2, ended("a"), ended("b"), ended("c"), ended("a"), ended("d"), ended("c"))
    assert value("maitred_tenant_requests_total", {"tenant": "a", "outcome": "finished"}) == 2
    assert value("maitred_tenant_requests_total", {"tenant": "c", "outcome": "finished"}) is None
    assert value("maitred_tenant_requests_total", {"tenant": "other", "outcome": "finished"}) == 3


def test_what_asks_for_no_work_is_nobodys():
    value = counted(2, ended("a", model=""))
    assert value("maitred_tenant_requests_total", {"tenant": "a", "outcome": "finished"}) is None


def test_ten_thousand_tenants_are_as_many_series_as_a_hundred():
    def series(tenants):
        metrics = Metrics(lambda: 0, dict, config=MetricsConfig(tenants=100))
        for number in range(tenants):
            for observer in metrics.observers:
                observer.on_request_end(ended(f"tenant-{number}"))
        body, _ = metrics.render("application/openmetrics-text")
        return sum(len(family.samples) for family in text_string_to_metric_families(body.decode())), len(body)

    few, _ = series(101)
    many, size_bytes = series(10_000)
    assert many == few < 2_000
    assert size_bytes < 200_000
