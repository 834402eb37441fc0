"""What is logged, and what never is."""

import json
import logging

from maitred.core.answer import Outcome, Tally
from maitred.observe.logs import JsonFormatter, RequestLog


def ended(outcome, released_s=None):
    tally = Tally("req-1", 1.0, route="/v1/completions", model="m", prompt_tokens=3, completion_tokens=2)
    tally.waited_ms, tally.released_s = {"slots": 12.34567}, released_s
    tally.close(outcome, 200, 1.5)
    return tally


def test_a_failure_is_a_warning_with_fields(caplog):
    with caplog.at_level(logging.INFO):
        RequestLog().ended(ended(Outcome.FINISHED))
        RequestLog().ended(ended(Outcome.FAILED))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    line = json.loads(JsonFormatter().format(record))
    assert line["level"] == "warning"
    assert line["request_id"] == "req-1"
    assert line["duration_s"] == 0.5
    assert line["completion_tokens"] == 2
    assert line["waited_ms"] == {"slots": 12.346}


def test_it_says_when_a_request_left_the_queue(caplog):
    with caplog.at_level(logging.INFO):
        RequestLog().ended(ended(Outcome.FAILED))
        RequestLog().ended(ended(Outcome.FAILED, released_s=1.25))
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [line["released_after_s"] for line in lines] == [None, 0.25]


def test_an_exception_is_one_line_of_json():
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "x", "exc_info": (ValueError, error, error.__traceback__)})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: broken" in json.loads(line)["exception"]
