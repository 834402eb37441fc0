"""Every metric is in docs/metrics.md, and nothing else is."""

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from maitred.app.admin.replicas import ReplicaAdmin
from maitred.app.admin.scaling import ScalingAdmin
from maitred.cache.backend import MemoryBackend
from maitred.core.clock import SystemClock
from maitred.core.context import (
    CacheResult,
    CacheStatus,
    Compaction,
    ModelSelection,
    Outcome,
    RejectedAnswer,
    RequestContext,
)
from maitred.core.errors import Saturated
from maitred.core.flow import PriorityClass
from maitred.core.inference import InferenceRequest
from maitred.core.replica import GpuState, LoadReport, ProcessState
from maitred.core.request import FinishReason, SamplingParams, Usage
from maitred.core.tenancy import ANONYMOUS
from maitred.core.usage import Feedback, FeedbackReceipt
from maitred.dispatch.metrics import dispatch_snapshot
from maitred.dispatch.queue import SpillReason
from maitred.observe.config import SloConfig
from maitred.observe.metrics.budgets import BudgetUse
from maitred.observe.metrics.engines import EngineState
from maitred.observe.metrics.registry import Metrics
from maitred.observe.metrics.reloads import ReloadMetrics, ReloadState
from maitred.observe.metrics.replicas import AgentMetrics, ReplicaMetrics
from maitred.observe.metrics.residency import ResidencyMetrics, ResidencyState, ResidentState
from maitred.observe.metrics.rollouts import RolloutMetrics, RolloutMetricsState
from maitred.observe.metrics.scaling import ScalingMetrics, ScalingState
from maitred.observe.metrics.semantic import SemanticCacheMetrics, SemanticCacheState
from maitred.observe.metrics.stores import AccountMetrics, AccountsState, CacheMetrics
from maitred.observe.metrics.upstreams import UpstreamMetrics, UpstreamState
from maitred.testing.script import SCRIPTED_CARD
from maitred.wire.admin.responses import AgentBody
from tests.support.clock import FakeClock
from tests.support.dispatchers import DispatchSetup

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
CARD = msgspec.structs.replace(SCRIPTED_CARD, kv_capacity_tokens=160)
LOAD = LoadReport(total_blocks=10, process=ProcessState(gpu=GpuState("GPU-1", 0.5, 1, 2)))
SLO = SloConfig(indicator="ttft", objective=0.9, within_s=1.0)
AGENT = AgentBody(
    model="m",
    agent="gpu-1",
    address=None,
    region="eu",
    zone="a",
    connected=True,
    takes_orders=True,
    fault=None,
    gpus=1,
    replicas=1,
    max_replicas=2,
    pending_orders=0,
)
SUFFIXES = {"_bucket", "_count", "_sum"}


SCALING = ScalingState(
    desired=2,
    desired_asleep=0,
    actual={"serving": 2},
    decisions={"steady": 1},
    reachable=True,
    override=False,
    deciding=True,
    forecast=(1.0, 2.0, 3.0),
    coverage=0.9,
    predicted_ttft_s=0.5,
    measured_ttft_s=0.4,
    start_s={"asleep": 1.0},
)


def replicas(dispatchers):
    clock = SystemClock()
    return ReplicaAdmin(dispatchers, {}, clock, ScalingAdmin({}, clock))


def accounts():
    return AccountsState(
        stores_up={"database": True}, recorded={"m": Usage(1, 1)}, costs_usd={"m": 0.5}, drift_tokens={"m": 0}
    )


async def budgets(tenants):
    return [BudgetUse(tenant, "usd_per_day", "", True, 0.5) for tenant in tenants]


def queues():
    core = DispatchSetup().core
    core.counters.on_rejection("queue_full")
    core.counters.on_dispatch(PriorityClass.STANDARD, {})
    core.counters.on_spill("us", SpillReason.OBJECTIVE)
    (endpoint_state,) = core.endpoint_states
    endpoint_state.endpoint = replace(endpoint_state.endpoint, round_trip_s=lambda: 0.08)
    return {"m": dispatch_snapshot(core, 0.0)}


def rendered():
    clock = FakeClock()
    metrics = Metrics(
        lambda: 0,
        lambda: {("m", "r"): EngineState(True, 0, LOAD, CARD)},
        queues,
        [
            UpstreamMetrics(lambda: {("m", "there"): UpstreamState(True, 1, 2, 3, 0.5)}),
            ResidencyMetrics(
                lambda: ResidencyState(1 << 30, {"m": ResidentState(True, False, False, 9, 8, 1, 2.0, 0, 0, 0, 0, 2.0)})
            ),
            ReplicaMetrics(replicas({"m": DispatchSetup().dispatcher}).all),
            AgentMetrics(lambda: [AGENT]),
            ScalingMetrics(lambda: {"m": SCALING}),
            RolloutMetrics(
                lambda: RolloutMetricsState(
                    {"m": 0.1}, {("m", "stable"): 1}, {("m", "ttft"): 0.0}, {("m", "agreed"): 1}, {("m", "aborted"): 1}
                )
            ),
            ReloadMetrics(lambda: ReloadState({"applied": 1})),
            AccountMetrics(accounts),
            CacheMetrics(MemoryBackend(1 << 20, clock).state),
            SemanticCacheMetrics(
                lambda: {
                    "m": SemanticCacheState(scopes={"shadow": 1}, bound=0.01, labels={True: 1}, audits={"none": 1})
                }
            ),
        ],
        workers=lambda: [(1, os.getpid())],
        slos={"prompt": SLO},
        clock=clock,
    )
    for _ in range(20):
        metrics.growth.sample()
        clock.now_s += 120
    context = RequestContext(
        "req-1", 0.0, route="/v1/completions", model="m", first_token_s=1.0, gaps_s=[0.1], completion_tokens=3
    )
    context.finish_reasons.append(FinishReason.STOP)
    context.principal, context.priority, context.failure = ANONYMOUS, PriorityClass.STANDARD, Saturated()
    context.request = InferenceRequest(
        model="m", prompts=["x"], sampling=SamplingParams(max_tokens=1, seed=0), max_tokens=1
    )
    context.refused_by = "tokens_per_minute"
    context.degraded.append("max_tokens=16")
    context.recoveries = context.continued = 1
    context.hedged = "second"
    context.fallbacks.append("general=big")
    context.rejected_answers.append(RejectedAnswer("m", "schema", Usage(1, 1), replaced=True))
    context.compaction = Compaction("m", Usage(1, 1))
    context.selection = ModelSelection("auto", "big", "large", 0.9)
    metrics.requests.on_degradation_skipped("overflow", "queue_full")
    context.close(Outcome.FINISHED, 200, 2.0)
    asyncio.run(metrics.budgets.refresh(budgets))
    metrics.feedback.on_feedback(FeedbackReceipt(Feedback(score=1.0), "m", "chat=canary", None))
    cached = RequestContext("req-2", 0.0, route="/v1/completions", model="m", completion_tokens=3)
    cached.cache = CacheResult(CacheStatus.HIT, "00", 1.0)
    cached.close(Outcome.FINISHED, 200, 1.0)
    for observer in metrics.observers:
        observer.on_request_end(context, cached)
    for steps in range(2):
        metrics.steps.on_report(("m", "r"), LoadReport(steps=steps))
    return list(text_string_to_metric_families(metrics.render()[0].decode()))


def test_the_page_and_the_registry_name_the_same_metrics():
    documented = set(re.findall(r"^\| `((?:maitred_|vllm:)\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    real = {family.name + ("_total" if family.type == "counter" else "") for family in rendered()}
    assert documented == real


def test_the_page_and_the_registry_name_the_same_labels():
    rows = dict(re.findall(r"^\| `(maitred_\w+)` \| \w+ \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE))
    for family in rendered():
        name = family.name + ("_total" if family.type == "counter" else "")
        if name.startswith("maitred_process_") or name.startswith("vllm:"):
            continue
        labels = set().union(*(sample.labels for sample in family.samples)) - {"le"}
        assert set(re.findall(r"`(\w+)`", rows[name])) == labels, name
