"""Known runs in, exact quantiles, rates and shares out."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from maitred.load.measure.columns import RequestColumns, pack_gaps, unpack_gaps
from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.measure.summary import MeasuringWindow, Quantiles, Summary, rate_window, summarise
from maitred.load.measure.times import RequestTimes
from maitred.load.spec import ObjectivesSpec, StopCondition


def record(
    due_s: float, first_s: float, outcome: UserOutcome = UserOutcome.COMPLETE, *, tenant: str = "a"
) -> RequestRecord:
    """Four tokens in two pieces, a second apart; 10 prompt tokens, 5 of them cached."""
    made = RequestRecord(session=0, turn=0, tenant=tenant, intended_s=due_s, asked_tokens=4, outcome=outcome)
    made.arrivals_s = array("d", [first_s, first_s + 1])
    made.prompt_tokens, made.cached_tokens, made.output_tokens = 10, 5, 4
    made.ended_s = first_s + 1
    return made


def times(records: Sequence[RequestRecord]) -> RequestTimes:
    return RequestTimes(RequestColumns.of(records), unpack_gaps(pack_gaps(records)))


def summary(
    *records: RequestRecord,
    window: tuple[float, float] = (0, 10),
    objectives: ObjectivesSpec | None = None,
    warmup_s: float = 0,
    tenant: str | None = None,
) -> Summary:
    return summarise(
        times(records), MeasuringWindow(*window), objectives or ObjectivesSpec(), warmup_s=warmup_s, tenant=tenant
    )


def test_quantiles_are_interpolated_linearly() -> None:
    found = Quantiles.of(np.array([4.0, 1.0, np.nan, 3.0, 2.0]))
    assert found == Quantiles(count=4, mean=2.5, p50=2.5, p90=3.7, p95=3.85, p99=3.97, max=4.0)


def test_quantiles_of_nothing() -> None:
    assert Quantiles.of(np.array([np.nan])) == Quantiles(count=0)


def test_rates_count_what_happened_in_the_window() -> None:
    # Of the second answer one piece comes after the window; the third is counted, but all of it comes after.
    found = summary(record(0, 1), record(5, 9.5), record(9, 12), window=(0, 10))
    assert found.requests == 3
    assert found.output_tokens == 12
    assert found.output_tokens_per_s == pytest.approx((4 + 2) / 10)
    assert found.requests_per_s == pytest.approx(1 / 10)
    assert found.prompt_tokens_per_s == pytest.approx(20 / 10)
    assert (found.prompt_tokens, found.cached_tokens) == (30, 15)


def test_the_warm_up_is_not_counted_but_its_tokens_arrive() -> None:
    found = summary(record(0, 3), record(2, 4), window=(2, 12), warmup_s=2)
    assert found.requests == 1
    assert found.ttft.count == 1
    assert found.ttft.max == 2
    assert found.output_tokens == 4
    assert found.output_tokens_per_s == pytest.approx(8 / 10)


def test_every_end_but_cancellation_counts_against_attainment() -> None:
    others = [outcome for outcome in UserOutcome if outcome is not UserOutcome.COMPLETE]
    found = summary(record(0, 1), record(0, 4), *(record(0, 1, outcome) for outcome in others), objectives=TTFT_2S)
    assert found.outcomes == {outcome.value: 1 for outcome in others} | {"complete": 2}
    assert found.attainment == pytest.approx(1 / (2 + len(others) - 1), abs=1e-6)
    assert found.goodput_per_s == pytest.approx(1 / 10)


def test_only_cancelled_requests_have_no_attainment() -> None:
    found = summary(record(0, 1, UserOutcome.CANCELLED))
    assert found.attainment is None
    assert found.requests == 1


def test_an_unfinished_request_has_a_first_token_but_no_end() -> None:
    found = summary(record(0, 1), record(0, 3, UserOutcome.UNFINISHED))
    assert found.ttft.count == 2
    assert found.e2e.count == 1


def test_a_tenant_alone() -> None:
    found = summary(record(0, 1), record(0, 3, tenant="b"), record(0, 5, tenant="b"), tenant="b")
    assert found.requests == 2
    assert found.ttft.p50 == 4
    assert found.output_tokens_per_s == pytest.approx(0.8)


def test_no_requests_and_no_window() -> None:
    found = summary(window=(0, 0))
    assert found.requests == 0
    assert found.outcomes == {}
    assert found.requests_per_s == found.output_tokens_per_s == found.goodput_per_s == 0
    assert found.attainment is None


def window(
    due_s: Sequence[float], bounds: StopCondition, *, seconds: float, has_trace: bool = False
) -> tuple[float, float]:
    records = [record(at_s, at_s + 1) for at_s in due_s]
    return tuple(rate_window(times(records), bounds, has_trace=has_trace, seconds=seconds))


def test_a_bounded_time_ends_the_window() -> None:
    assert window([0, 10, 58], StopCondition(duration_s=60, warmup_s=5), seconds=90) == (5, 60)
    assert window([0, 10, 58], StopCondition(), seconds=90) == (0, 60)


def test_a_run_that_was_stopped_ends_its_window() -> None:
    assert window([0, 10], StopCondition(duration_s=60), seconds=20) == (0, 20)


def test_the_last_request_that_was_due_ends_the_window() -> None:
    assert window([0, 10, 20], StopCondition(requests=3, duration_s=60), seconds=25) == (0, 20)
    assert window([0, 10, 20], StopCondition(duration_s=60), seconds=25, has_trace=True) == (0, 20)


def test_a_burst_is_counted_to_its_last_answer() -> None:
    assert window([0, 0, 1], StopCondition(requests=3), seconds=25) == (0, 25)


def test_a_warm_up_longer_than_the_run_leaves_no_window() -> None:
    assert window([0, 1], StopCondition(duration_s=5, warmup_s=10), seconds=4) == (4, 4)
    assert window([], StopCondition(requests=3), seconds=0) == (0, 0)


TTFT_2S = ObjectivesSpec(ttft_s=2)
