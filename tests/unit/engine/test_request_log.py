"""What an engine logs of requests."""

import logging

import pytest

from tests.unit.engine.test_engine import Bench

ENGINE = "maitred.engine"


def messages(caplog):
    return [(record.levelname, record.request_id, record.getMessage()) for record in caplog.records]


def test_an_answer_is_a_line_under_the_id_that_its_client_knows(caplog):
    bench = Bench()
    bench.runner.step_s = 0.25
    with caplog.at_level(logging.DEBUG, ENGINE):
        bench.submit("use-1-0", prompt=4, max_tokens=2, known_as="hello", trace_id="4bf9")
        bench.step()
        bench.step()
    (record,) = caplog.records
    assert record.trace_id == "4bf9"
    assert messages(caplog) == [
        (
            *("DEBUG", "hello"),
            "choice 0 ended by length: 4 prompt tokens, 0 of them cached, and 2 output tokens; waited 0.000 s, "
            "prefill 0.250 s, decode 0.250 s, 0 preemptions",
        )
    ]


def test_a_cancelled_choice_is_logged_with_our_id_where_it_has_no_other(caplog):
    bench = Bench()
    with caplog.at_level(logging.DEBUG, ENGINE):
        bench.submit("use-1-0", max_tokens=9, n=2)
        bench.step()
        bench.engine.cancel("owner", "use-1-0", 1)
    assert messages(caplog) == [("DEBUG", "use-1-0", "choice 1 cancelled after 1 output tokens")]


def test_who_gives_its_place_to_others_is_a_line(caplog):
    bench = Bench(blocks=32, prefix_cache=False)
    with caplog.at_level(logging.DEBUG, ENGINE):
        for name in "abcd":
            bench.submit(name, prompt=8, max_tokens=56)
        for _ in range(40):
            bench.step()
    assert any("gives its place to others after" in message for _, _, message in messages(caplog))


def test_a_step_that_fails_names_those_who_were_in_it(caplog, monkeypatch):
    bench = Bench()
    bench.submit("use-1-0", known_as="poison", n=2)
    bench.submit("use-2-0", known_as="bystander")

    def execute(plan):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench.runner, "execute", execute)
    with caplog.at_level(logging.DEBUG, ENGINE), pytest.raises(RuntimeError, match="out of memory"):
        bench.step()
    assert caplog.messages == ["a step failed that had 2 requests in it: poison, bystander"]


def test_by_default_nothing_is_logged_of_successful_requests(caplog):
    bench = Bench()
    with caplog.at_level(logging.INFO, ENGINE):
        bench.submit("a", max_tokens=1)
        bench.step()
    assert not caplog.records
