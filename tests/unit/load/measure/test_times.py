"""Known arrivals in, the defined times out."""

import math
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from maitred.load.measure.columns import RequestColumns, pack_gaps, unpack_gaps
from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.measure.times import RequestTimes
from maitred.load.spec import ObjectivesSpec


def record(
    due_s: float, arrivals_s: Sequence[float] = (), *, tokens: int = 0, outcome: UserOutcome = UserOutcome.COMPLETE
) -> RequestRecord:
    made = RequestRecord(session=0, turn=0, tenant="a", intended_s=due_s, asked_tokens=tokens, outcome=outcome)
    made.arrivals_s = array("d", arrivals_s)
    made.output_tokens = tokens
    made.ended_s = (arrivals_s[-1] if arrivals_s else due_s) + 0.5
    return made


def times(*records: RequestRecord) -> RequestTimes:
    return RequestTimes(RequestColumns.of(records), unpack_gaps(pack_gaps(records)))


def test_latencies_start_when_the_request_was_due() -> None:
    late = record(1.0, [3.0, 3.5, 4.5], tokens=4)
    late.sent_s = 2.9
    known = times(late)
    assert known.ttft_s.tolist() == [2.0]
    assert known.e2e_s.tolist() == [3.5]
    assert known.tpot_s.tolist() == [0.5]
    assert known.itl_s.tolist() == [0.5, 1.0]


def test_gaps_and_arrivals_know_their_request() -> None:
    known = times(record(0, [1.0, 1.25]), record(0), record(0, [2.0]), record(0, [3.0, 3.5, 3.75]))
    assert known.itl_s.tolist() == [0.25, 0.5, 0.25]
    assert known.itl_request.tolist() == [0, 3, 3]
    assert known.arrival_s.tolist() == [1.0, 1.25, 2.0, 3.0, 3.5, 3.75]
    assert known.arrival_request.tolist() == [0, 0, 2, 3, 3, 3]
    assert known.itl_arrival_s.tolist() == [1.25, 3.5, 3.75]


def test_rounding_adds_up_over_a_long_answer() -> None:
    arrivals_s = [0.1 + number / 3e3 for number in range(10_000)]
    known = times(record(0, arrivals_s))
    assert known.arrival_s[-1] == pytest.approx(arrivals_s[-1], abs=1e-6)
    assert known.itl_s.sum() == pytest.approx(arrivals_s[-1] - arrivals_s[0], abs=2e-6)


def test_tokens_are_spread_evenly_over_the_pieces() -> None:
    delivered = times(record(0, [1.0, 2.0], tokens=5), record(0, [3.0, 4.0, 5.0])).delivered
    assert delivered.tokens.tolist() == [2.5, 2.5, 1, 1, 1]
    assert delivered.request.tolist() == [0, 0, 1, 1, 1]


def test_an_answer_that_was_not_streamed_arrives_when_it_ends() -> None:
    whole = record(1.0, tokens=8)
    known = times(whole)
    assert known.e2e_s.tolist() == [0.5]
    assert math.isnan(known.ttft_s[0])
    assert math.isnan(known.tpot_s[0])
    assert known.delivered.at_s.tolist() == [1.5]
    assert known.delivered.tokens.tolist() == [8]
    assert known.met_flags(ObjectivesSpec(ttft_s=0.4)).tolist() == [False]
    assert known.met_flags(ObjectivesSpec(ttft_s=0.6)).tolist() == [True]


def test_half_an_answer_has_no_end() -> None:
    known = times(record(0, [1.0, 2.0], outcome=UserOutcome.CUT))
    assert known.ttft_s.tolist() == [1.0]
    assert math.isnan(known.e2e_s[0])
    assert math.isnan(known.tpot_s[0])


def test_one_piece_shows_no_pace() -> None:
    known = times(record(0, [1.0], tokens=30))
    assert math.isnan(known.tpot_s[0])
    assert known.met_flags(ObjectivesSpec(tpot_s=0.001)).tolist() == [True]


@pytest.mark.parametrize("outcome", [outcome for outcome in UserOutcome if outcome is not UserOutcome.COMPLETE])
def test_only_complete_answers_meet_objectives(outcome: UserOutcome) -> None:
    assert times(record(0, [0.1], outcome=outcome)).met_flags(ObjectivesSpec()).tolist() == [False]


def test_all_objectives_that_are_given_must_be_met() -> None:
    known = times(record(0, [1.0, 2.0], tokens=3))
    assert known.met_flags(ObjectivesSpec(ttft_s=1.0, tpot_s=0.5, e2e_s=2.0)).all()
    for missed in (ObjectivesSpec(ttft_s=0.99), ObjectivesSpec(tpot_s=0.49), ObjectivesSpec(e2e_s=1.99)):
        assert not known.met_flags(missed).any()


def test_a_run_without_requests() -> None:
    known = times()
    for values in (known.ttft_s, known.e2e_s, known.itl_s, known.arrival_s, known.delivered.at_s, known.itl_arrival_s):
        assert values.tolist() == []


def test_a_silence_too_long_for_the_file_is_its_longest() -> None:
    assert unpack_gaps(pack_gaps([record(0, [0, 5000])])).tolist() == [2**32 - 1]


def test_columns_say_none_for_what_never_was() -> None:
    columns = RequestColumns.of([record(0)])
    assert columns.sent_s == [None]
    assert columns.first_s == [None]
    assert np.isnan(columns.array("sent_s")).all()
    with pytest.raises(KeyError):
        columns.array("ttft")
