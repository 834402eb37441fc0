"""What is logged, and what never is."""

import json
import logging

import pytest

from maitred.core.context import LOG_CONTEXT, LogContext, Outcome, RequestContext
from maitred.observe.config import LogConfig
from maitred.observe.logs import JsonFormatter, RequestLog, configure_logging


def ended(outcome, released_s=None):
    context = RequestContext("req-1", 1.0, route="/v1/completions", model="m", prompt_tokens=3, completion_tokens=2)
    context.waited_ms, context.dispatched_s = {"slots": 12.34567}, released_s
    context.close(outcome, 200, 1.5)
    return context


def test_a_failure_is_a_warning_with_fields(caplog):
    with caplog.at_level(logging.INFO):
        RequestLog().on_request_end(ended(Outcome.FINISHED))
        RequestLog().on_request_end(ended(Outcome.FAILED))
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
        RequestLog().on_request_end(ended(Outcome.FAILED))
        RequestLog().on_request_end(ended(Outcome.FAILED, released_s=1.25))
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


@pytest.fixture
def root():
    """The root logger, put back as it was."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield root
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.level = before


def test_a_flood_is_counted(root, capsys):
    configure_logging(LogConfig(burst=3))
    log = logging.getLogger("maitred.test")
    for number in range(1_237):
        log.warning("%d is away", number)
    log.warning("something else")
    root.handlers[0].close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("maitred.test  ")[2] for line in lines] == [
        *("0 is away", "1 is away", "2 is away", "something else", "suppressed 1,234 like this: %d is away")
    ]


@pytest.mark.parametrize("shape", ["text", "json"])
def test_a_line_says_for_which_request_it_was_written(root, capsys, shape):
    configure_logging(LogConfig(format=shape))
    log = logging.getLogger("maitred.test")
    in_hand = LogContext("req-7")
    in_hand.trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    token = LOG_CONTEXT.set(in_hand)
    log.warning("the replica is away")
    log.warning("request req-7 failed")
    in_hand.over = True
    log.warning("later")
    LOG_CONTEXT.reset(token)
    first, second, later = capsys.readouterr().err.splitlines()
    if shape == "json":
        assert {key: json.loads(first)[key] for key in ("request_id", "trace_id")} == {
            "request_id": "req-7",
            "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        }
        assert "request_id" not in json.loads(later)
    else:
        assert first.endswith("the replica is away [req-7 4bf92f3577b34da6a3ce929d0e0e4736]")
        assert second.endswith("request req-7 failed [4bf92f3577b34da6a3ce929d0e0e4736]")
        assert later.endswith("later")
