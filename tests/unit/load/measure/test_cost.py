from array import array

import pytest

from maitred.load.measure.cost import judge
from maitred.load.measure.record import LoadTesterSample, RequestRecord, RunData, UserOutcome


def a_run(*, lag_s=0.0005, cpu_share=0.3, starved_share=0.0, send_delay_s=0.0005, ttft_s=0.2, itl_s=0.05):
    records = [
        RequestRecord(
            session=number,
            turn=0,
            tenant="default",
            intended_s=number * 0.1,
            asked_tokens=20,
            late_s=send_delay_s,
            sent_s=number * 0.1 + 1.0,
            arrivals_s=array("d", [number * 0.1 + ttft_s + place * itl_s for place in range(20)]),
            ended_s=number * 0.1 + ttft_s + 20 * itl_s,
            outcome=UserOutcome.COMPLETE,
        )
        for number in range(100)
    ]
    samples = [LoadTesterSample(second + 1.0, cpu_share, starved_share, lag_s, 7, 50_000_000) for second in range(10)]
    return RunData(
        records, samples, 10.0, 0.0, array("d", [lag_s] * 900), cpu_seconds=3.0, peak_memory_bytes=60_000_000
    )


def test_a_tester_that_is_not_busy_is_no_limit():
    cost = judge(a_run())
    assert cost.limit == "none"
    assert (cost.cpu_seconds, cost.cpu_share, cost.cpu_share_max) == (3.0, 0.3, 0.3)
    assert (cost.peak_open, cost.peak_memory_bytes) == (7, 60_000_000)
    assert cost.lag_p99_s == cost.lag_max_s == pytest.approx(0.0005)
    assert cost.send_delay_p50_s == pytest.approx(0.0005)


def test_a_late_loop_on_a_full_core_is_the_testers_fault():
    cost = judge(a_run(lag_s=0.01, cpu_share=0.97))
    assert cost.limit == "tester"
    assert "between tokens (50.0 ms) may be 10.0 ms off" in cost.verdict


def test_a_late_loop_without_a_core_is_the_machines_fault():
    assert judge(a_run(lag_s=0.01, cpu_share=0.4, starved_share=0.5)).limit == "machine"
    assert judge(a_run(lag_s=0.01, cpu_share=0.02, starved_share=0.1)).limit == "machine"


def test_a_late_loop_that_blocks_without_computing_is_the_testers_fault():
    assert judge(a_run(lag_s=0.01, cpu_share=0.2, starved_share=0.0)).limit == "tester"


def test_lag_is_held_against_what_it_dates():
    assert judge(a_run(lag_s=0.01, itl_s=0.5, ttft_s=2.0)).limit == "none"
    assert judge(a_run(lag_s=0.01, itl_s=0.5, ttft_s=0.1)).limit == "tester"
    assert judge(a_run(lag_s=0.0019, itl_s=0.001, ttft_s=0.01)).limit == "none"


def test_requests_that_go_out_late_are_the_testers_fault():
    cost = judge(a_run(send_delay_s=0.05, cpu_share=0.95))
    assert cost.limit == "tester"
    assert "went out 50 ms or more after it was due" in cost.verdict


def test_a_server_that_takes_long_to_accept_is_not_the_testers_fault():
    run = a_run()
    assert all(record.sent_s - record.intended_s > 0.9 for record in run.records)
    assert judge(run).limit == "none"


def test_a_run_without_anything_is_judged_too():
    cost = judge(RunData([], [], 0.0, 0.0))
    assert (cost.limit, cost.cpu_share, cost.peak_open) == ("none", 0.0, 0)
