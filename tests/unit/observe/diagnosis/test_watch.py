"""Several scrapes become vitals: gauges their means, counters what was added."""

import pytest

from maitred.observe.diagnosis.watch import ScrapeWatcher
from maitred.observe.samples import MetricSamples, parse_metrics

ENGINE = '{model="m",replica="r"}'


def look(*lines):
    return MetricSamples(parse_metrics("\n".join(lines) + "\n"))


def vitals(*looks, seconds=4.0):
    return ScrapeWatcher(looks, seconds).snapshot()


def test_gauges_are_means_and_counters_what_was_added():
    state = vitals(
        *(
            look(
                f"maitred_engine_up{ENGINE} 1",
                f"maitred_engine_running{ENGINE} {running}",
                f"maitred_engine_steps_total{ENGINE} {steps}",
                f"maitred_engine_step_seconds_total{ENGINE} {steps / 100}",
                f"maitred_engine_kv_blocks_total{ENGINE} 10",
                f"maitred_engine_kv_blocks_free{ENGINE} 5",
                f"maitred_event_loop_cpu_seconds_total {steps / 100}",
            )
            for running, steps in ((1, 100), (2, 200), (6, 300))
        )
    )
    (engine,) = state.engines
    assert (engine.running, engine.steps, engine.kv_free_share) == (3.0, 200.0, 0.5)
    assert engine.busy_share == pytest.approx(0.5)
    assert engine.step_s == pytest.approx(0.01)
    assert state.gateway.loop_cpu_share == pytest.approx(0.5)


def test_a_counter_that_began_anew_counts_what_it_has():
    looks = [
        look(f"maitred_engine_up{ENGINE} {up}", f"maitred_engine_steps_total{ENGINE} {n}") for up, n in ((1, 9), (0, 4))
    ]
    (engine,) = vitals(*looks).engines
    assert (engine.steps, engine.up) == (4.0, 0.5)


def test_the_tightest_objective_of_a_model_counts():
    slo = 'maitred_slo_within_seconds{{slo="{0}",model="{1}",class="*",indicator="{2}"}} {3}'
    lines = ['maitred_ttft_seconds_count{model="m"} 1']
    lines += [slo.format("a", "m", "ttft", 0.9), slo.format("b", "*", "ttft", 0.5), slo.format("c", "n", "ttft", 0.1)]
    lines += [slo.format("d", "m", "itl", 0.01)]
    (model,) = vitals(look(*lines), look(*lines)).models
    assert model.first_token_within_s == 0.5


def test_waits_and_what_is_left_belong_to_their_queue():
    wait = 'maitred_dispatch_queue_seconds_{0}{{model="{1}",class="{2}",cause="{3}"}} {4}'

    def lines(seconds):
        yield 'maitred_dispatch_running{model="m"} 3'
        yield 'maitred_dispatch_waiting{model="m",class="standard"} 2'
        yield 'maitred_dispatch_waiting{model="m",class="batch"} 4'
        yield 'maitred_dispatch_credits{model="m",replica="a",resource="slots",state="free"} 1'
        yield 'maitred_dispatch_credits{model="m",replica="b",resource="slots",state="free"} 2'
        for priority in ("standard", "batch"):
            yield wait.format("sum", "m", priority, "slots", seconds)
            yield wait.format("sum", "n", priority, "slots", 100 * seconds)

    (line,) = vitals(look(*lines(1)), look(*lines(3))).queues
    assert (line.waiting, line.free_slots, line.pressure) == (6.0, 3.0, pytest.approx(2 / 3))
    assert line.waited_s == {"slots": 4.0}


def test_a_page_that_says_little_is_no_fault():
    assert vitals(look("maitred_in_flight 0"), look("maitred_in_flight 0")).engines == []
