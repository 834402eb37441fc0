"""Counters over restarts."""

import asyncio
from contextlib import suppress

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from maitred.load.chaos.meter import MetricsMeter, TokenBill, probe_bill
from maitred.load.chaos.scrape import CounterTotals, MetricsPoller
from maitred.load.measure.record import RunData
from maitred.observe.samples import MetricSeries, parse_metrics

OUTPUT, PROMPT, STEPS = "maitred_output_tokens_total", "maitred_prompt_tokens_total", "maitred_engine_steps_total"


def test_the_samples_of_a_name_are_kept_by_label_and_shown_as_a_sum():
    text = (
        "# HELP maitred_output_tokens_total Tokens.\n# TYPE maitred_output_tokens_total counter\n"
        'maitred_output_tokens_total{model="a"} 5.0\nmaitred_output_tokens_total{model="b"} 7.0\n'
        "# TYPE maitred_in_flight gauge\nmaitred_in_flight 2.0\n"
    )
    samples = parse_metrics(text)
    assert samples == {
        MetricSeries(OUTPUT, frozenset({("model", "a")})): 5.0,
        MetricSeries(OUTPUT, frozenset({("model", "b")})): 7.0,
        MetricSeries("maitred_in_flight"): 2.0,
    }
    counters = CounterTotals()
    counters.take(samples)
    assert counters.latest == {OUTPUT: 12.0, "maitred_in_flight": 2.0}
    with pytest.raises(ValueError):
        parse_metrics("<html>no metrics</html>")


def counted(*looks):
    counters = CounterTotals()
    for look in looks:
        counters.take(
            {name if isinstance(name, MetricSeries) else MetricSeries(name): value for name, value in look.items()}
        )
    return counters


def of_engine(number, name=STEPS):
    return MetricSeries(name, frozenset({("model", "tiny"), ("replica", f"tiny-{number}")}))


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


def test_one_of_several_engines_begins_anew_and_the_others_are_not_counted_again():
    counters = counted(
        {of_engine(0): 100, of_engine(1): 70},
        {of_engine(0): 4, of_engine(1): 75},
        {of_engine(0): 9, of_engine(1): 80},
    )
    assert counters.total(STEPS) == 109 + 80


def test_an_engine_that_begins_anew_does_not_hide_behind_the_growth_of_another():
    assert counted({of_engine(0): 5, of_engine(1): 10}, {of_engine(0): 1, of_engine(1): 90}).total(STEPS) == 6 + 90


def test_an_engine_that_has_gone_has_counted_what_it_has():
    counters = counted({of_engine(0): 5, of_engine(1): 10}, {of_engine(1): 12}, {of_engine(0): 3, of_engine(1): 12})
    assert counters.total(STEPS) == 5 + 3 + 12


def test_the_same_replica_name_of_two_models_is_two_engines():
    one, other = (MetricSeries(STEPS, frozenset({("model", model), ("replica", "0")})) for model in ("a", "b"))
    assert counted({one: 50, other: 50}, {one: 2, other: 60}).total(STEPS) == 52 + 60


def test_restarts_are_counted_by_the_gateway_and_outlive_the_engine():
    restarts = "maitred_engine_restarts_total"
    counters = counted({of_engine(0): 50, of_engine(0, restarts): 1}, {of_engine(0): 2, of_engine(0, restarts): 2})
    assert (counters.total(STEPS), counters.total(restarts)) == (52, 2)


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=3, max_size=3), max_size=20))
def test_every_step_of_every_engine_is_counted_once(rounds):
    """Engines that begin anew show less than before, so that a look can tell."""
    counters, shown, made = CounterTotals(), [0, 0, 0], 0
    for engines in rounds:
        for number, (steps, anew) in enumerate(engines):
            if anew and steps < shown[number]:
                shown[number] = 0
            shown[number] += steps
            made += steps
        counters.take({of_engine(number): value for number, value in enumerate(shown)})
    assert (counters.total(STEPS) or 0) == made


def test_gauges_may_fall():
    counters = counted({"maitred_in_flight": 5, OUTPUT: 1}, {"maitred_in_flight": 0, OUTPUT: 2})
    assert counters.total(OUTPUT) == 2


def test_a_server_without_a_meter_has_no_bill():
    assert MetricsMeter(counted({"up": 1})).bill() is None
    assert MetricsMeter(counted({OUTPUT: 3, PROMPT: 9})).bill() == TokenBill(prompt_tokens=9, output_tokens=3)


def test_probes_cost_what_calibration_found():
    data = RunData([], [], 1.0, 0.0, tokens_per_word=1.5, template_tokens=6.0)
    assert probe_bill(data) == TokenBill(prompt_tokens=round(1.5 * 280 + 12), output_tokens=2)


def test_under_vllms_names_an_engine_that_begins_anew_is_no_new_gateway_either():
    aliased = MetricSeries("vllm:prompt_tokens_total", frozenset({("model_name", "tiny"), ("engine", "tiny-0")}))
    counters = counted({OUTPUT: 30, aliased: 70}, {OUTPUT: 31, aliased: 4})
    assert counters.total(OUTPUT) == 31
    assert counters.total(aliased.name) == 74


async def test_scrapes_at_once_are_not_taken_in_another_order():
    """The first of two answers comes late. Taken after the second, its lower count would be that of a new process."""
    asked, another, late = 0, asyncio.Event(), asyncio.Event()

    async def metrics(request):
        nonlocal asked
        asked += 1
        count = asked
        if count > 1:
            another.set()
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(another.wait(), 0.1)
                await asyncio.sleep(0.1)
            late.set()
        return web.Response(text=f"{OUTPUT} {count * 10}\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with MetricsPoller(f"http://127.0.0.1:{runner.addresses[0][1]}") as poller:
            assert all(await asyncio.gather(*(poller.poll() for _ in range(3))))
            await late.wait()
            for _ in range(3):
                await poller.poll()
            assert poller.counters.total(OUTPUT) == asked * 10
    finally:
        await runner.cleanup()
