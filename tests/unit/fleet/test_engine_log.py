"""What an engine prints, in our log."""

import json
import logging

from maitred.fleet.engine_log import log_line


def line(**fields):
    return json.dumps({"time": "2026-11-22T19:00:00.000Z", "logger": "maitred.engine", **fields}).encode()


def test_a_line_of_its_log_keeps_what_it_says(caplog):
    with caplog.at_level(logging.INFO):
        text = log_line(7, line(level="warning", message="50 % of it", request_id="req-1", trace_id="4bf9", more=[1]))
    (record,) = caplog.records
    assert text == "50 % of it"
    assert (record.name, record.levelno, record.getMessage()) == ("maitred.engine", 30, "engine 7: 50 % of it")
    assert (record.request_id, record.trace_id) == ("req-1", "4bf9")


def test_an_exception_stays_with_its_line(caplog):
    with caplog.at_level(logging.INFO):
        text = log_line(7, line(level="error", message="it broke", exception="ValueError: broken"))
    assert text == "it broke\nValueError: broken"
    assert caplog.messages == [f"engine 7: {text}"]


def test_what_we_do_not_log_is_known_all_the_same(caplog):
    with caplog.at_level(logging.WARNING):
        assert log_line(7, line(level="info", message="ready")) == "ready"
    assert not caplog.records


def test_what_is_printed_is_a_line_of_ours(caplog):
    with caplog.at_level(logging.INFO):
        stranger = line(level="notice", message="a library's own JSON")
        for printed in (b"Traceback (most recent call last):", b'{"level": "info"}', b"[1]", b"\xff", stranger):
            log_line(7, printed)
    assert {(record.name, record.levelno) for record in caplog.records} == {("maitred.engine", logging.INFO)}
    assert len(caplog.records) == 5
    assert caplog.messages[0] == "engine 7: Traceback (most recent call last):"


def test_progress_is_passed_on(caplog):
    with caplog.at_level(logging.INFO):
        log_line(7, line(level="info", message="Converting", progress=0.5))
        log_line(7, line(level="info", message="converted"))
    first, second = caplog.records
    assert first.progress == 0.5
    assert not hasattr(second, "progress")
