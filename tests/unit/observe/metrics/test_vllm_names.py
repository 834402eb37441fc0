"""What was built for vLLM's metrics finds them, with the values of ours."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from maitred.core.context import Outcome, RequestContext
from maitred.core.inference import InferenceRequest
from maitred.core.replica import LoadReport
from maitred.core.request import FinishReason, SamplingParams
from maitred.dispatch.metrics import dispatch_snapshot
from maitred.observe.config import MetricsConfig
from maitred.observe.metrics.engines import EngineState
from maitred.observe.metrics.registry import Metrics
from maitred.testing.script import SCRIPTED_CARD
from tests.support.dispatchers import DispatchSetup

ROOT = Path(__file__).parents[4]
QUERIES = [
    (source, names.split())
    for source, _, names in (
        line.partition("\t") for line in (ROOT / "tests/data/metrics/asked.tsv").read_text().splitlines()
    )
]
"""Who asks, and the names in one of its queries as they are spelt there; see the README beside the file."""


def metrics(**options):
    loads = {
        ("m", "one"): LoadReport(running=3, waiting=1, free_blocks=25, total_blocks=100, prompt_tokens=70),
        ("m", "two"): LoadReport(running=5, free_blocks=100, total_blocks=100, prompt_tokens=30, cached_tokens=8),
    }
    queue = replace(dispatch_snapshot(DispatchSetup().core, 0.0), waiting={"standard": 1, "batch": 2})
    made = Metrics(
        lambda: 0,
        lambda: {where: EngineState(True, 0, load, None) for where, load in loads.items()},
        queues=lambda: {"m": queue},
        **options,
    )
    context = RequestContext("req-1", 0.0, route="/v1/completions", model="m", first_token_s=3.0, gaps_s=[0.5])
    context.prompt_tokens, context.completion_tokens, context.waited_ms = (
        70,
        5,
        {"slots": 1500.0, "tenant_share": 500.0},
    )
    context.finish_reasons += [FinishReason.LENGTH]
    context.request = InferenceRequest(
        model="m", prompts=["x"], sampling=SamplingParams(max_tokens=5, seed=0), max_tokens=5
    )
    context.close(Outcome.FINISHED, 200, 5.0)
    made.requests.on_request_end(context)
    for steps in range(2):
        made.steps.on_report(("m", "one"), LoadReport(steps=steps, prefill_tokens=8 * steps))
    return made


@pytest.fixture
def samples():
    made = metrics()
    return [sample for family in prometheus(made.render()[0].decode()) for sample in family.samples]


def values(samples, name):
    """By the labels, the model's before the engine's."""
    named = [sample for sample in samples if sample.name == name]
    return {tuple(value for _, value in sorted(s.labels.items(), reverse=True)): s.value for s in named}


def test_as_many_queries_of_others_are_answered_as_the_page_says(samples):
    """A query is answered if every name in it is there, with the labels that select a model."""
    known = {sample.name for sample in samples if {"model_name", "engine"} <= set(sample.labels)}
    asked, answered = Counter(), Counter()
    for source, names in QUERIES:
        asked[source] += 1
        answered[source] += all(any(re.fullmatch(name, series) for series in known) for name in names)
    page = (ROOT / "docs/metrics.md").read_text()
    documented = re.findall(r"^\| [^|]+ \(`([\w-]+)`\) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert {source: (int(of), int(share)) for source, of, share in documented} == {
        source: (of, answered[source]) for source, of in asked.items()
    }


def test_the_size_of_the_cache_is_exported_as_routers_read_it():
    card = msgspec.structs.replace(SCRIPTED_CARD, kv_capacity_tokens=1600)
    made = Metrics(lambda: 0, lambda: {("m", "r"): EngineState(True, 0, LoadReport(total_blocks=100), card)})
    (info,) = (line for line in made.render()[0].decode().splitlines() if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="16"' in info
    assert 'num_gpu_blocks="100"' in info


def test_engines_have_their_own_series_and_waiting_requests_are_counted(samples):
    assert values(samples, "vllm:num_requests_running") == {("m", "one"): 3, ("m", "two"): 5}
    assert values(samples, "vllm:num_requests_waiting") == {("m", "one"): 1, ("m", "two"): 0, ("m", "gateway"): 3}
    assert values(samples, "vllm:kv_cache_usage_perc") == {("m", "one"): 0.75, ("m", "two"): 0.0}
    assert values(samples, "vllm:prefix_cache_hits_total") == {("m", "one"): 0, ("m", "two"): 8}


def test_the_parts_of_a_request_add_up(samples):
    def seconds(name):
        (value,) = values(samples, f"vllm:{name}_seconds_sum").values()
        return value

    assert seconds("request_queue_time") == 2.0
    assert seconds("request_prefill_time") == 1.0
    assert seconds("request_decode_time") == 2.0
    assert seconds("request_time_per_output_token") == 0.5
    assert seconds("e2e_request_latency") == 5.0
    assert seconds("time_to_first_token") == 3.0
    (finished,) = (s for s in samples if s.name == "vllm:request_success_total")
    assert (finished.labels["finished_reason"], finished.value) == ("length", 1.0)


def test_they_can_be_left_out():
    made = metrics(config=MetricsConfig(vllm_names=False))
    assert "vllm:" not in made.render()[0].decode()


def test_whoever_accepts_openmetrics_gets_it():
    made = metrics()
    body, content_type = made.render("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    plain, _ = made.render()
    assert _values(openmetrics(body.decode())) == _values(prometheus(plain.decode()))


def _values(families):
    living = ("maitred_process_", "maitred_event_loop_")
    samples = (s for family in families for s in family.samples if not s.name.startswith(living))
    return {(s.name, frozenset(s.labels.items())): s.value for s in samples}
