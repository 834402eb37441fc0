"""What a loaded server shows of itself, read by the parsers that those who collect metrics use."""

import asyncio

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from maitred.testing.server_process import serving
from tests.support.suite.fork_server import new_interpreters

MODEL = "maitred-tiny"
SETTINGS = {
    "engine.threads": 1,
    "engine.kv_memory_bytes": 64 << 20,
    "slos.answers.indicator": "availability",
    "slos.answers.objective": 0.99,
    "slos.prompt.indicator": "ttft",
    "slos.prompt.within_s": 30,
    "slos.prompt.objective": 0.9,
    "slos.prompt.priority": "interactive",
}


@pytest.fixture(scope="module")
def server():
    # The processor time of a fork is none when it begins.
    with new_interpreters(), serving(settings=SETTINGS) as running:
        asyncio.run(load(running.url))
        yield running


async def load(url):
    """Requests of two classes, alone and together, some of them faulty and one given up."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        body = {"model": MODEL, "prompt": "The waiter said that", "max_tokens": 12}

        async def ask(**changes):
            headers = changes.pop("headers", {})
            return (await client.post("/v1/completions", json=body | changes, headers=headers)).status_code

        statuses = await asyncio.gather(
            *(ask(headers={"x-maitred-priority": "interactive"}) for _ in range(6)),
            *(ask(n=2) for _ in range(4)),
            ask(model="nobody"),
            ask(max_tokens=-1),
        )
        assert statuses == [200] * 10 + [404, 400]
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body | {"max_tokens": 1500, "ignore_eos": True}, timeout=0.3)


def samples(text, parse):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
        if sample.labels.get("route") != "/metrics"  # where looking changes what is seen
    }


def value(server, name, **labels):
    """The samples of that name with at least these labels, added up."""
    found = samples(httpx.get(f"{server.url}/metrics").text, prometheus)
    return sum(number for (one, has), number in found.items() if one == name and has >= labels.items())


def test_a_loaded_server_speaks_openmetrics_as_its_own_parser_wants_it(server):
    answer = httpx.get(f"{server.url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    spoken = samples(answer.text, openmetrics)
    plain = samples(httpx.get(f"{server.url}/metrics").text, prometheus)
    assert len(spoken) > 500
    assert spoken.keys() == plain.keys()


def test_requests_are_known_by_model_class_and_end_and_errors_by_their_codes(server):
    assert value(server, "maitred_model_requests_total", **{"class": "interactive", "outcome": "finished"}) == 6
    assert value(server, "maitred_model_requests_total", **{"class": "standard", "outcome": "finished"}) == 4
    assert value(server, "maitred_errors_total", code="model_not_found") == 1
    assert value(server, "maitred_tenant_requests_total", tenant="anonymous", outcome="finished") == 10


def test_the_engines_process_is_shown_beside_the_gateways(server):
    assert value(server, "maitred_engine_process_cpu_seconds_total") > 0.1
    assert value(server, "maitred_engine_process_resident_memory_bytes") > 50 << 20
    assert value(server, "maitred_process_resident_memory_bytes") > 20 << 20


def test_objectives_are_kept_account_of(server):
    assert value(server, "maitred_slo_good_total", slo="answers") == 10
    assert value(server, "maitred_slo_events_total", slo="answers") == 10
    assert value(server, "maitred_slo_good_total", slo="prompt", **{"class": "interactive"}) == 6
    assert value(server, "maitred_slo_error_budget_left", slo="prompt") == 1.0


def test_every_step_of_the_engine_is_counted_and_so_is_what_it_computed(server):
    before = server.metrics()  # what was before the first report that was heard is not spread over the histograms
    asked = {"model": MODEL, "prompt": "The waiter came back and", "max_tokens": 9, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=300).status_code == 200
    seen = {name: now - before[name] for name, now in server.metrics().items() if name in before}
    assert seen["maitred_step_seconds_count"] == seen["maitred_engine_steps_total"] >= 9
    computed = seen["maitred_engine_prefill_tokens_total"] + seen["maitred_engine_decode_tokens_total"]
    assert seen["maitred_step_tokens_sum"] == computed > 0
    assert 0 < seen["maitred_step_seconds_sum"] == pytest.approx(seen["maitred_engine_step_seconds_total"])
