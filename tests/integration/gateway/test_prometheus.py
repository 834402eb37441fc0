"""A real Prometheus looks at a loaded server, with the rules and the dashboards' queries that come along."""

import asyncio
import json
import re
import subprocess
import threading
import time

import httpx
import pytest

from maitred.testing.server_process import serving
from tests.support.servers.prometheus_server import DEPLOYED, prometheus_server, promtool

MODEL = "maitred-tiny"
SETTINGS = {
    "engine.threads": 1,
    "engine.kv_memory_bytes": 64 << 20,
    "identity.limits.usd_per_day": 5,
    "slos.answers.indicator": "availability",
    "slos.answers.objective": 0.99,
    # Nobody can be so quick: this is the fault that is planted.
    "slos.hopeless.indicator": "ttft",
    "slos.hopeless.within_s": 0.000_001,
    "slos.hopeless.objective": 0.99,
}
NOT_HERE = re.compile(
    r"maitred_(upstream_|model_reserved|residency_|fallbacks|escalations|hedges|recoveries|continued|limit_refusals"
    r"|degraded|dispatch_refusals|engine_gpu_|engine_drafted)"
)
"""What this server has none of: servers of others, models on demand, a GPU, drafts, and faults that did not happen."""


@pytest.fixture(scope="module")
def prometheus():
    """One that has been looking for some seconds at a server with something to do."""
    with serving(settings=SETTINGS) as server, prometheus_server(server.url.removeprefix("http://")) as running:
        over = threading.Event()
        users = threading.Thread(target=asyncio.run, args=(use(server.url, over),))
        users.start()
        try:
            wait_for(lambda: running.query('min_over_time(maitred_slo_events_total{slo="hopeless"}[5s]) > 10'))
            wait_for(lambda: running.query("slo:maitred_slo_errors:ratio_rate1h"))
            yield running
        finally:
            over.set()
            users.join()


async def use(url, over):
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def user():
            while not over.is_set():
                answer = await ask("The waiter")
                await client.post("/v1/feedback", json={"request_id": answer.headers["x-request-id"], "score": 0.75})
                await asyncio.sleep(0.1)

        async def ask(prompt):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
            return await client.post("/v1/completions", json=body)

        async def mistaken_user():
            while not over.is_set():
                await ask("far too long " * 4000)
                await asyncio.sleep(0.5)

        await asyncio.gather(*(user() for _ in range(4)), mistaken_user())


def wait_for(condition, timeout_s=300.0):
    give_up_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up_s
        time.sleep(0.2)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", DEPLOYED / "prometheus.yml"],
        ["check", "rules", *sorted((DEPLOYED / "rules").glob("*.yml"))],
        ["test", "rules", *sorted((DEPLOYED / "tests").glob("*.yml"))],
    ],
)
def test_its_own_tool_finds_no_fault_in_configuration_and_rules(arguments):
    result = subprocess.run([promtool(), *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_it_takes_what_it_is_given(prometheus):
    (target,) = prometheus.targets()
    assert (target["health"], target["lastError"]) == ("up", "")


def test_every_rule_is_sound_and_those_of_traffic_have_values(prometheus):
    wait_for(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()))
    recording = [rule for rule in prometheus.rules() if rule["type"] == "recording"]
    wait_for(lambda: all(prometheus.query(rule["name"]) for rule in recording))


def test_the_alert_of_the_planted_fault_fires_and_no_other_objective_is_in_danger(prometheus):
    fires = 'ALERTS{alertname="MaitredBudgetBurnsFast", alertstate="firing"}'
    (alert,) = wait_for(lambda: prometheus.query(fires))
    assert (alert["metric"]["slo"], alert["metric"]["severity"]) == ("hopeless", "page")
    assert prometheus.query('ALERTS{alertname=~"Maitred(Gone|EngineDown|StoreAway|TurnsAway|Thrashes)"}') == []


def queries():
    for path in sorted((DEPLOYED.parent / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


def test_every_query_of_the_dashboards_is_answered(prometheus):
    """Those about something that this server has nothing of are answered with nothing."""

    def silent(query):
        for variable, value in (("$__rate_interval", "10s"), ("$model", ".*"), ("$tenant", ".*")):
            query = query.replace(variable, value)
        return not prometheus.query(query) and not NOT_HERE.search(query)

    assert [where for where, query in queries() if silent(query)] == []


def test_what_dashboards_and_rules_ask_for_is_shown_or_recorded(prometheus):
    shown = prometheus.families()
    recorded = {rule["name"] for rule in prometheus.rules() if rule["type"] == "recording"}
    asked = [query for _, query in queries()] + [rule["query"] for rule in prometheus.rules()]
    names = {name for query in asked for name in re.findall(r"[\w:]*maitred_[\w:]+", query)}
    assert {
        name for name in names - recorded - shown if re.sub(r"_(bucket|sum|count|total)$", "", name) not in shown
    } == set()


@pytest.mark.parametrize(
    "query",
    [
        f'sum(vllm:num_requests_waiting{{model_name="{MODEL}"}})',
        f'histogram_quantile(0.9, rate(vllm:e2e_request_latency_seconds_bucket{{model_name="{MODEL}"}}[10s]))',
        f'avg(vllm:gpu_cache_usage_perc{{model_name="{MODEL}"}})',
        f'sum(rate({{__name__=~"vllm:request_success(_total)?", model_name="{MODEL}"}}[10s]))',
        f'sum(rate(vllm:iteration_tokens_total_sum{{model_name="{MODEL}"}}[10s]))',
    ],
)
def test_what_was_written_for_vllm_is_answered(prometheus, query):
    (series,) = prometheus.query(query)
    assert float(series["value"][1]) >= 0.0
