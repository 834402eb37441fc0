"""No double bill, bounded overshoot."""

import pytest
from msgspec.structs import replace

from maitred.load.chaos.accounts import bounded_overshoot, budgets_kept, no_double_bill
from maitred.load.chaos.evidence import ChaosEvidence, ChaosPhase
from maitred.load.chaos.meter import TokenBill
from maitred.load.measure.record import UserOutcome
from maitred.load.spec import LoadTarget
from tests.unit.load.chaos.records import PROMPT_TOKENS, SPEC, TOKENS, answered, bill, cut, evidence, phase, steady


def test_the_exact_bill_holds():
    verdict = no_double_bill(evidence())
    assert verdict.state == "held"
    assert "in calm 400 prompt tokens of at most 400" in verdict.found


@pytest.mark.parametrize("extra", [TokenBill(prompt_tokens=1), TokenBill(output_tokens=1)])
def test_one_token_too_many_is_caught(extra):
    assert no_double_bill(evidence(billed=bill(steady()) + extra)).state == "broken"


def test_one_token_too_many_in_calm_is_caught():
    sound = evidence()
    calm = ChaosPhase(records=sound.calm.records, billed=bill(steady()) + TokenBill(output_tokens=1))
    verdict = no_double_bill(ChaosEvidence(sound.spec, calm, sound.chaos, [], sound.end))
    assert verdict.examples == ["in calm the meter shows 1 output tokens more than can be explained."]


def test_a_retried_request_explains_one_more_bill_but_not_two():
    records = [answered(0, attempts=2), answered(1)]
    once_more = bill(records) + TokenBill(prompt_tokens=PROMPT_TOKENS, output_tokens=TOKENS)
    assert no_double_bill(evidence(records, billed=once_more)).state == "held"
    assert no_double_bill(evidence(records, billed=once_more + TokenBill(output_tokens=1))).state == "broken"


def test_a_cut_answer_explains_what_was_asked_for():
    records = [cut(0), answered(1)]
    most = bill(records) + TokenBill(prompt_tokens=PROMPT_TOKENS, output_tokens=TOKENS)
    assert no_double_bill(evidence(records, billed=most)).state == "held"
    assert no_double_bill(evidence(records, billed=most + TokenBill(prompt_tokens=1))).state == "broken"


@pytest.mark.parametrize("record", [cut(0, outcome=UserOutcome.REFUSED), cut(0, sent_s=float("nan"))])
def test_a_request_that_was_not_taken_explains_nothing(record):
    records = [record, answered(1)]
    assert no_double_bill(evidence(records, billed=bill(records) + TokenBill(output_tokens=1))).state == "broken"


def test_the_testers_own_probes_are_explained():
    probes = TokenBill(prompt_tokens=280, output_tokens=2)
    billed = bill(steady()) + probes
    assert no_double_bill(evidence(billed=billed, probes=probes)).state == "held"
    assert no_double_bill(evidence(billed=billed)).state == "broken"
    too_much = evidence(billed=billed + TokenBill(prompt_tokens=2), probes=probes)
    assert no_double_bill(too_much).state == "broken"


def test_without_a_meter_or_usage_it_is_not_held():
    assert no_double_bill(evidence(billed=None)).state == "unchecked"
    assert no_double_bill(evidence(calm=steady(output_tokens=0))).state == "unchecked"


def test_what_was_computed_for_those_who_left_is_bounded():
    records = [cut(0, words=2, outcome=UserOutcome.CANCELLED), answered(1)]
    verdict = bounded_overshoot(evidence(records, generated_tokens=2 + 4 + 10), 10)
    assert verdict.state == "held"
    assert verdict.found == "16 computed, 6 delivered, 1 departures: 10.0 tokens each"
    assert bounded_overshoot(evidence(records, generated_tokens=2 + 4 + 11), 10).state == "broken"


def test_the_bound_is_per_departure():
    records = [cut(number, outcome=UserOutcome.CANCELLED) for number in range(4)]
    assert bounded_overshoot(evidence(records, generated_tokens=8 + 40), 10).state == "held"
    assert bounded_overshoot(evidence(records, generated_tokens=8 + 41), 10).state == "broken"


def test_nobody_left_and_yet_tokens_for_nobody_is_caught():
    assert bounded_overshoot(evidence(), 10).state == "held"
    verdict = bounded_overshoot(evidence(generated_tokens=161), 10)
    assert verdict.examples == ["1 tokens more were computed than delivered, and nobody has left."]


def test_pieces_that_hold_several_tokens_are_measured_by_their_text():
    record = cut(0, text=["0.0.0 0.0.1 "])
    del record.arrivals_s[1:]
    verdict = bounded_overshoot(evidence([record], generated_tokens=2), 0)
    assert verdict.state == "held"


def test_overshoot_needs_the_engines_count_and_streams():
    assert bounded_overshoot(evidence(generated_tokens=None), 10).state == "unchecked"
    spec = replace(SPEC, target=LoadTarget(stream=False))
    assert bounded_overshoot(evidence(spec=spec), 10).state == "unchecked"


def test_budgets_are_not_called_kept_where_there_are_none():
    assert budgets_kept().state == "unchecked"


def test_a_burst_is_not_taken_for_the_sessions_of_the_load():
    left = [cut(0, prompt_tokens=0, outcome=UserOutcome.CANCELLED)]
    sound = evidence()
    chaos = phase(
        steady(), bursts=left, billed=bill(steady()) + TokenBill(prompt_tokens=PROMPT_TOKENS, output_tokens=TOKENS)
    )
    assert no_double_bill(ChaosEvidence(sound.spec, sound.calm, chaos, [], sound.end)).state == "held"
