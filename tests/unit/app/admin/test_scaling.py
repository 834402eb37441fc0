"""What operators see of scaling, and what they may set."""

import json
import math

import msgspec
import pytest

from maitred.app.admin.scaling import ScalingAdmin
from maitred.core.errors import InvalidRequest, ResourceNotFound, StoreUnavailable
from maitred.observe.metrics.scaling import ScalingMetrics
from maitred.wire.admin.scaling import ScalingHistoryQuery, SetScalingOverride
from tests.unit.app.scaling.test_scaler import Setup


@pytest.fixture
def setup():
    return Setup(min_replicas=1)


@pytest.fixture
def admin(setup):
    return ScalingAdmin({"chat": setup.scaler}, setup.clock)


def wish(replicas=2, for_s=60.0, model="chat"):
    return SetScalingOverride(model=model, replicas=replicas, for_s=for_s)


async def test_the_state_before_the_first_decision_is_shown(admin):
    (body,) = admin.all()
    assert (body.desired, body.actual, body.decision, body.deciding) == (1, {"serving": 1}, None, False)


async def test_a_decision_is_shown_with_its_reason_and_its_numbers(setup, admin):
    await setup.steps(70, arrivals=2)
    (body,) = admin.all()
    assert body.deciding
    assert body.decision.desired == body.desired > 1
    assert body.decision.replica_requests_per_s > 0
    assert body.decision.forecast.low <= body.decision.forecast.mean <= body.decision.forecast.high
    assert body.outcomes[0].predicted_s is None or body.outcomes[0].predicted_s > 0
    json.loads(msgspec.json.encode(body))


async def test_what_grows_without_end_is_null_and_said(setup, admin):
    await setup.steps(1)
    last = setup.scaler.decisions[-1]
    evidence = msgspec.structs.replace(last.decision.evidence, ttft_s=math.inf, ttft_with_one_less_s=math.inf)
    decision = msgspec.structs.replace(last.decision, evidence=evidence)
    setup.scaler.decisions[-1] = msgspec.structs.replace(last, decision=decision)
    (body,) = admin.all()
    assert body.decision.predicted_ttft_s is None


async def test_decisions_that_changed_something_come_from_the_store_in_pages(setup, admin):
    await setup.steps(1)
    for replicas in (2, 3, 4):
        await admin.set_override(wish(replicas))
        await setup.steps(1)
    first = await admin.decisions(ScalingHistoryQuery(model="chat", limit=2))
    assert [decision.desired for decision in first.data] == [4, 3]
    rest = await admin.decisions(ScalingHistoryQuery(model="chat", limit=2, after=first.next))
    assert [decision.desired for decision in rest.data] == [2, 1]
    assert (rest.has_more, rest.next) == (False, None)


async def test_a_replica_that_the_backend_has_just_lost_is_left_out(setup, admin, monkeypatch):
    monkeypatch.setattr(setup.pool.backend, "replicas", lambda: {})
    (body,) = admin.all()
    assert (body.replicas, body.actual) == ([], {"serving": 1})


async def test_a_decision_is_told_with_the_objectives_that_it_had(setup, admin):
    await setup.steps(70, arrivals=2)
    told = [decision.text for decision in (await admin.decisions(ScalingHistoryQuery(model="chat"))).data]
    assert any(f" of {setup.scaler.config.ttft_s:g} s" in text for text in told)
    setup.scaler.reconfigure(msgspec.structs.replace(setup.scaler.config, ttft_s=77.0))
    await setup.steps(1)
    after = (await admin.decisions(ScalingHistoryQuery(model="chat", unchanged=True))).data
    assert (await admin.decisions(ScalingHistoryQuery(model="chat"))).data[-1].text == told[-1]
    assert not any("of 77 s" in decision.text for decision in after[1:])


async def test_the_last_decisions_can_be_seen_even_if_they_changed_nothing(setup, admin):
    await setup.steps(5)
    page = await admin.decisions(ScalingHistoryQuery(model="chat", unchanged=True, limit=3))
    assert [decision.changed for decision in page.data] == [False, False, False]
    page = await admin.decisions(ScalingHistoryQuery(model="chat", unchanged=True))
    assert [decision.changed for decision in page.data] == [False, False, False, False, True]


async def test_an_override_is_shown_until_its_end(setup, admin):
    await setup.steps(1)
    assert (await admin.set_override(wish(3, for_s=10.0))).override.replicas == 3
    setup.clock.now_s += 11.0
    assert admin.all()[0].override is None
    await admin.set_override(wish(3))
    assert (await admin.end_override("chat")).override is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 5}, "replicas"),
        ({"for_s": 0.0}, "for_s"),
        ({"for_s": 31 * 86_400.0}, "for_s"),
    ],
)
async def test_a_number_outside_the_limits_is_refused(admin, fields, param):
    with pytest.raises(InvalidRequest) as refused:
        await admin.set_override(wish(**fields))
    assert refused.value.param == param


async def test_a_model_that_does_not_follow_the_demand_is_unknown(admin):
    with pytest.raises(ResourceNotFound, match="'other'"):
        await admin.set_override(wish(model="other"))
    with pytest.raises(ResourceNotFound):
        await admin.end_override("other")
    with pytest.raises(ResourceNotFound):
        await admin.decisions(ScalingHistoryQuery(model="other"))


async def test_nothing_is_set_while_the_database_is_away(setup, admin):
    await setup.steps(1)
    setup.leases.away = True
    with pytest.raises(StoreUnavailable):
        await admin.set_override(wish())
    setup.leases.away = False
    assert admin.all()[0].override is None


async def test_metrics_say_what_is_known_and_leave_out_what_is_not(setup, admin):
    def samples():
        return {
            (sample.name, sample.labels.get("phase") or sample.labels.get("reason")): sample.value
            for family in ScalingMetrics(admin.states).collect()
            for sample in family.samples
        }

    before = samples()
    assert before["maitred_scaling_desired_replicas", "serving"] == 1
    assert before["maitred_scaling_replicas", "serving"] == 1
    assert ("maitred_scaling_predicted_ttft_seconds", None) not in before
    await setup.steps(3)
    after = samples()
    assert after["maitred_scaling_deciding", None] == 1
    assert sum(value for (name, _), value in after.items() if name == "maitred_scaling_decisions_total") == 3
