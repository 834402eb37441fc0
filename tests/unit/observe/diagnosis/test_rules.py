"""Each rule with figures that just call for it, and with some that do not."""

import pytest

from maitred.observe.diagnosis.diagnosis import diagnose
from maitred.observe.diagnosis.finding import FindingKind
from maitred.observe.diagnosis.snapshot import (
    EngineVitals,
    GatewayVitals,
    GrowthVitals,
    HealthSnapshot,
    ModelVitals,
    QueueVitals,
    StoreVitals,
    UpstreamVitals,
)

ENGINE = {"model": "m", "replica": "r", "steps": 100.0, "step_s": 0.02, "prefill_tokens": 100, "decode_tokens": 900}
LINE = {"model": "m", "waiting": 8.0, "running": 4.0, "dispatched": 10.0, "total_slots": 4.0, "total_kv_tokens": 1000.0}


def vitals(*, engine=None, line=None, **more):
    return HealthSnapshot(
        seconds=5.0,
        ended=100.0,
        engines=[EngineVitals(**ENGINE, **(engine or {}))],
        queues=[QueueVitals(**LINE | (line or {}))],
        **more,
    )


def kinds(state):
    return [finding.kind for finding in diagnose(state)]


CALM = {"waiting": 0.0}
FULL = {"waited_s": {"slots": 9.0, "tenant_share": 50.0}}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (vitals(line=CALM), []),
        (vitals(line=CALM, engine={"busy_share": 1.0}), []),
        (vitals(line=FULL, engine={"busy_share": 0.9}), [FindingKind.COMPUTE]),
        (vitals(line=FULL, engine={"busy_share": 0.4}), [FindingKind.QUEUE]),
        (vitals(line={"waited_s": {"kv_full": 9.0, "slots": 1.0}}), [FindingKind.KV_MEMORY]),
        (vitals(line=CALM, engine={"recomputed_tokens": 200, "preemptions": 9}), [FindingKind.KV_MEMORY]),
        (vitals(line={"free_slots": 2.0, "free_kv_tokens": 10.0}), [FindingKind.KV_MEMORY]),
        (vitals(line={"free_slots": 2.0, "free_kv_tokens": 900.0}), [FindingKind.QUEUE]),
        (vitals(line={**CALM, "rejected": {"queue_full": 9.0}}), [FindingKind.QUEUE]),
        (vitals(line=CALM, engine={"up": 0.0}), [FindingKind.REPLICA]),
        (vitals(line=CALM, engine={"up": 0.0, "on_demand": True}), []),
        (vitals(line=CALM, engine={"up": 0.0, "on_demand": True}, unserved={"m": 3.0}), [FindingKind.REPLICA]),
        (vitals(line=CALM, engine={"restarts": 1.0}), [FindingKind.REPLICA]),
        (vitals(line=CALM, engine={"paused": 3.0, "running": 5.0}), [FindingKind.SLOW_CLIENTS]),
        (vitals(line=CALM, engine={"paused": 0.4}), []),
        (vitals(line=CALM, stalled=40.0), [FindingKind.SLOW_CLIENTS]),
        (vitals(line=CALM, limit_rejections={"tokens_per_minute": 30.0}), [FindingKind.LIMITS]),
        (vitals(line=CALM, limit_rejections={"tokens_per_minute": 1.0}), []),
        (vitals(line=CALM, gateway=GatewayVitals(loop_cpu_share=0.4, loop_wait_share=0.5)), [FindingKind.GATEWAY]),
        (vitals(line=CALM, gateway=GatewayVitals(loop_cpu_share=0.4, loop_wait_share=0.2)), []),
        (vitals(line=CALM, gateway=GatewayVitals(cpu_share=1.2, cpu_wait_share=0.9)), [FindingKind.GATEWAY]),
        (vitals(line=CALM, gateway=GatewayVitals(open_fds=900, max_fds=1000)), [FindingKind.GATEWAY]),
        (vitals(line=CALM, stores=StoreVitals(backlog=9, backlog_age_s=4.0)), [FindingKind.STORE]),
        (vitals(line=CALM, stores=StoreVitals(backlog=9, backlog_age_s=1.0)), []),
        (vitals(line=CALM, stores=StoreVitals(down={"counters": 1.0})), [FindingKind.STORE]),
    ],
)
def test_what_is_found(state, expected):
    assert kinds(state) == expected


def test_only_tenants_that_were_refused_are_named():
    state = vitals(
        line=CALM,
        limit_rejections={"requests_per_minute": 30.0},
        rejected_by_tenant={"calm": 0.0, "a": 10.0, "b": 20.0},
    )
    (finding,) = diagnose(state)
    assert finding.where == "b, a"
    assert finding.evidence[1:] == ("b: 20 refused.", "a: 10 refused.")


def test_what_an_upstream_does_is_measured_by_its_objective():
    upstream = UpstreamVitals(model="far", upstream="there", open_requests=3.0)

    def slow(**model):
        return kinds(HealthSnapshot(seconds=5.0, upstreams=[upstream], models=[ModelVitals(model="far", **model)]))

    assert slow(answered=9, prefill_s=0.8, tpot_s=0.03) == []
    assert slow(answered=9, prefill_s=0.8, tpot_s=0.03, first_token_within_s=0.3) == [FindingKind.UPSTREAM]
    assert slow(answered=9, prefill_s=1.8, tpot_s=0.03) == [FindingKind.UPSTREAM]
    assert slow(answered=9, prefill_s=0.2, tpot_s=0.5) == [FindingKind.UPSTREAM]
    assert slow() == [FindingKind.UPSTREAM]  # nothing came in five seconds


def test_causes_come_before_what_follows_from_them():
    state = vitals(line=FULL | {"rejected": {"queue_full": 90.0}}, engine={"busy_share": 0.9})
    assert kinds(state) == [FindingKind.COMPUTE, FindingKind.QUEUE]


def test_a_gateway_without_time_makes_clients_look_slow():
    starved = GatewayVitals(loop_cpu_share=0.9)
    assert kinds(vitals(line=CALM, engine={"paused": 9.0}, gateway=starved)) == [
        FindingKind.GATEWAY,
        FindingKind.SLOW_CLIENTS,
    ]


def test_the_first_step_against_a_full_batch_depends_on_what_fills_it():
    (decodes,) = diagnose(vitals(line=FULL, engine={"busy_share": 0.9}))
    assert "engine.max_sequences" in decodes.remedy
    assert decodes.weight == pytest.approx(8 / 12)


@pytest.mark.parametrize(
    ("growth", "found"),
    [
        ({"resource": "memory_bytes", "per_hour": 1e8, "trend": 0.9, "level": 1e9}, True),
        ({"resource": "memory_bytes", "per_hour": 1e8, "trend": 0.4, "level": 1e9}, False),
        ({"resource": "memory_bytes", "per_hour": 1e6, "trend": 1.0, "level": 1e8}, False),
        ({"resource": "open_fds", "per_hour": 60.0, "trend": 0.9, "level": 200}, True),
        ({"resource": "memory_bytes", "per_hour": -1e9, "trend": -1.0, "level": 1e9}, False),
    ],
)
def test_leaks(growth, found):
    state = vitals(line=CALM, growth=[GrowthVitals(process="gateway", **growth)])
    assert kinds(state) == [FindingKind.LEAK] * found
