"""Rates of short runs with long answers: which of the last answers still end inside is chance."""

import random
from array import array

import pytest

from maitred.load.analysis.compare import compare
from maitred.load.measure.record import RequestRecord, RunData, UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.spec import ArrivalsSpec, LoadSpec, StopCondition

SPEC = LoadSpec(arrivals=ArrivalsSpec(rate_per_s=5), bounds=StopCondition(duration_s=40))


def result(seed):
    """200 requests in 40 s at the same times, each of which takes 2 to 20 s."""
    rng = random.Random(seed)
    records = []
    for number in range(200):
        due_s, lasts_s = number * 0.2, rng.uniform(2, 20)
        record = RequestRecord(number, 0, "default", due_s, 5, sent_s=due_s, ended_s=due_s + lasts_s, output_tokens=5)
        record.arrivals_s = array("d", [due_s + lasts_s * part / 5 for part in range(1, 6)])
        record.outcome = UserOutcome.COMPLETE
        records.append(record)
    seconds = max(record.ended_s for record in records)
    return LoadResult.of(SPEC, RunData(records, [], seconds, 0.0), command="", workload="")


@pytest.mark.parametrize("pair", range(4))
def test_the_edges_of_the_window_make_no_difference_of_rates(pair):
    rows = {row.metric: row for row in compare([result(2 * pair)], [result(2 * pair + 1)]).rows}
    for metric in ("requests_per_s", "output_tokens_per_s"):
        row = rows[metric]
        assert row.low < 1 < row.high
        assert row.verdict not in ("worse", "better")
    # Answers in flight at the end are a quarter of all; chance moves their share, but not by this much.
    assert 0.01 < rows["requests_per_s"].high - rows["requests_per_s"].low < 0.5
