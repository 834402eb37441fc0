"""What the cache of answers did is counted, and what it saved is not counted as computed."""

import pytest
from prometheus_client import CollectorRegistry

from maitred.core.context import CacheResult, CacheStatus, Outcome, RequestContext
from maitred.core.request import FinishReason
from maitred.core.tenancy import Principal
from maitred.observe.metrics.requests import RequestMetrics, TenantMetrics
from maitred.observe.metrics.semantic import SemanticCacheMetrics, SemanticCacheState
from maitred.observe.metrics.stores import CacheMetrics
from maitred.observe.recent import RecentTraffic
from maitred.wire.admin.cache import CacheStoreBody
from tests.support.clock import FakeClock

SERVED = (CacheStatus.HIT, CacheStatus.COALESCED, CacheStatus.SEMANTIC)


def ended(status=None, *, first_token_s=1.0):
    principal = Principal(key="k", tenants=("team", "acme"), scopes=frozenset())
    context = RequestContext("req-1", 0.0, route="/v1/completions", model="m", principal=principal)
    context.first_token_s, context.prompt_tokens, context.completion_tokens = first_token_s, 10, 3
    context.finish_reasons = [FinishReason.STOP]
    context.cache = None if status is None else CacheResult(status, "key")
    context.close(Outcome.FINISHED, 200, 2.0)
    return context


def counted(*contexts):
    registry = CollectorRegistry()
    for observer in (RequestMetrics(registry), TenantMetrics(registry, 10)):
        observer.on_request_end(*contexts)
    return lambda name, **labels: registry.get_sample_value(name, labels)


def test_look_ups_are_counted_by_their_result():
    value = counted(*(ended(status) for status in CacheStatus for _ in range(2)), ended())
    for status in CacheStatus:
        assert value("maitred_cache_lookups_total", model="m", result=status) == 2
    assert value("maitred_cache_saved_tokens_total", model="m") == 2 * len(SERVED) * 13


@pytest.mark.parametrize("first_token_s", [None, 1.0])
@pytest.mark.parametrize("status", SERVED)
def test_an_answer_that_was_not_computed_counts_as_a_request_and_in_no_tokens_or_times(status, first_token_s):
    value = counted(ended(status, first_token_s=first_token_s), ended(CacheStatus.MISS))
    assert value("maitred_requests_total", route="/v1/completions", outcome="finished", status="200") == 2
    assert value("maitred_tenant_requests_total", tenant="acme", outcome="finished") == 2
    for name, tokens in {"prompt": 10, "output": 3}.items():
        assert value(f"maitred_{name}_tokens_total", model="m") == tokens
        assert value(f"maitred_tenant_{name}_tokens_total", tenant="acme") == tokens
    for name in ("ttft", "e2e", "decode", "queue"):
        assert value(f"maitred_{name}_seconds_count", model="m") == 1
    assert value("maitred_tenant_ttft_seconds_count", tenant="acme") == 1


def test_live_traffic_has_only_tokens_that_were_computed():
    recent = RecentTraffic(FakeClock())
    recent.on_request_end(ended(), ended(CacheStatus.MISS), *(ended(status) for status in SERVED))
    point = recent.tick(0, 0)
    assert (point.ended, point.prompt_tokens, point.output_tokens) == ({Outcome.FINISHED: 5}, 20, 6)
    traffic = recent.tenants["acme"]
    assert (traffic.requests, traffic.prompt_tokens, traffic.output_tokens) == (5, 20, 6)
    assert recent.cache_use.lookups == {CacheStatus.MISS: 1} | dict.fromkeys(SERVED, 1)
    assert recent.cache_use.saved_tokens == 39


def test_the_semantic_cache_is_shown_by_model():
    states = {
        "m": SemanticCacheState(
            scopes={"certified": 2, "shadow": 1},
            bound=0.0041,
            labels={True: 7, False: 3},
            audits={"same": 5, "false": 2, "none": 4},
            false_hits=1,
            audit_tokens=99,
        ),
        "n": SemanticCacheState(scopes={"shadow": 1}),
    }
    registry = CollectorRegistry()
    registry.register(SemanticCacheMetrics(lambda: states))
    shown = {
        (sample.name.removeprefix("maitred_cache_semantic_"), *sorted(sample.labels.values())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    assert shown == {
        ("scopes", "certified", "m"): 2,
        ("scopes", "m", "shadow"): 1,
        ("scopes", "n", "shadow"): 1,
        ("bound", "m"): 0.0041,
        ("labels_total", "m", "true"): 7,
        ("labels_total", "false", "m"): 3,
        ("audits_total", "m", "same"): 5,
        ("audits_total", "false", "m"): 2,
        ("audits_total", "m", "none"): 4,
        ("false_hits_total", "m"): 1,
        ("false_hits_total", "n"): 0,
        ("audit_tokens_total", "m"): 99,
        ("audit_tokens_total", "n"): 0,
    }


def test_a_store_that_knows_no_sizes_shows_none():
    store = CacheStoreBody(backend="redis", answers=None, bytes=None, max_bytes=None, stores=3, evictions=0)
    assert [family.name for family in CacheMetrics(lambda: store).collect()] == [
        "maitred_cache_stores",
        "maitred_cache_evictions",
    ]
