"""Counters over restarts."""

import pytest

from maitred.load.chaos.meter import Bill, MetricsMeter, probe_bill
from maitred.load.chaos.scrape import Counters, parse_metrics
from maitred.load.measure.record import RunData

OUTPUT, PROMPT, STEPS = "maitred_output_tokens_total", "maitred_prompt_tokens_total", "maitred_engine_steps_total"


def test_the_samples_of_a_name_are_summed():
    text = (
        "# HELP maitred_output_tokens_total Tokens.\n# TYPE maitred_output_tokens_total counter\n"
        'maitred_output_tokens_total{model="a"} 5.0\nmaitred_output_tokens_total{model="b"} 7.0\n'
        "# TYPE maitred_in_flight gauge\nmaitred_in_flight 2.0\n"
    )
    assert parse_metrics(text) == {OUTPUT: 12.0, "maitred_in_flight": 2.0}
    with pytest.raises(ValueError):
        parse_metrics("<html>no metrics</html>")


def counted(*looks):
    counters = Counters()
    for look in looks:
        counters.take(look)
    return counters


def test_lives_are_added_up():
    counters = counted({OUTPUT: 10}, {OUTPUT: 30}, {OUTPUT: 5}, {OUTPUT: 9}, {OUTPUT: 2})
    assert counters.total(OUTPUT) == 30 + 9 + 2


def test_a_new_life_is_seen_by_any_counter_of_the_process():
    """The tokens alone would look like growth."""
    counters = counted({OUTPUT: 10, PROMPT: 100}, {OUTPUT: 12, PROMPT: 20})
    assert (counters.total(OUTPUT), counters.total(PROMPT)) == (22, 120)


def test_a_counter_that_is_not_there_yet_after_a_restart_is_one_that_began_anew():
    assert counted({OUTPUT: 10}, {}).total(OUTPUT) == 10
    assert counted({OUTPUT: 10}, {}, {OUTPUT: 4}).total(OUTPUT) == 14


def test_the_engine_and_the_gateway_begin_anew_on_their_own():
    counters = counted({OUTPUT: 10, STEPS: 50}, {OUTPUT: 15, STEPS: 3})
    assert (counters.total(OUTPUT), counters.total(STEPS)) == (15, 53)


def test_gauges_may_fall():
    counters = counted({"maitred_in_flight": 5, OUTPUT: 1}, {"maitred_in_flight": 0, OUTPUT: 2})
    assert counters.total(OUTPUT) == 2


def test_a_server_without_a_meter_has_no_bill():
    assert MetricsMeter(counted({"up": 1})).bill() is None
    assert MetricsMeter(counted({OUTPUT: 3, PROMPT: 9})).bill() == Bill(prompt_tokens=9, output_tokens=3)


def test_probes_cost_what_calibration_found():
    data = RunData([], [], 1.0, 0.0, tokens_per_word=1.5, template_tokens=6.0)
    assert probe_bill(data) == Bill(prompt_tokens=round(1.5 * 280 + 12), output_tokens=2)
