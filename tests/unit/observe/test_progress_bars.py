"""Bars for what takes long, on a terminal, and lines elsewhere."""

import io
import json
import logging

import pytest

from maitred.observe.logs import JsonFormatter, LogHandler, TextFormatter

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    """Terminal that keeps what is written to it."""

    def isatty(self):
        return True


@pytest.fixture
def handler(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    handler = LogHandler(burst=100)
    handler.setFormatter(TextFormatter())
    yield handler
    handler.close()


def report(handler, message, progress=None):
    record = logging.makeLogRecord({"msg": message, "name": "maitred.test", "levelname": "INFO"})
    if progress is not None:
        record.progress = progress
    handler.handle(record)


def test_a_terminal_shows_bars_and_gets_its_cursor_back(handler):
    handler.setStream(Terminal())
    for progress in (0.0, 0.5):
        report(handler, "Converting", progress)
    assert " 50%" in handler.stream.getvalue()
    assert SHOW not in handler.stream.getvalue()
    report(handler, "Converting", 1.0)
    shown = handler.stream.getvalue()
    assert "100%" in shown
    assert (shown.count(HIDE), shown.count(SHOW)) == (1, 1)


def test_lines_stand_above_a_bar_and_alone_without_one(handler):
    handler.setStream(Terminal())
    report(handler, "Warming up", 0.5)
    report(handler, "[bold]8[/] steps were timed")
    report(handler, "Warming up", 1.0)
    report(handler, "ready")
    *_, above, last = handler.stream.getvalue().partition(SHOW)
    before, _, after = handler.stream.getvalue().partition("[bold]8[/] steps were timed")
    assert "Warming up" in before
    assert "Warming up" in after  # drawn again, below
    assert above == SHOW
    assert last.strip().endswith("maitred.test  ready")


def test_a_process_that_ends_early_gives_the_cursor_back(handler):
    handler.setStream(Terminal())
    report(handler, "Converting", 0.5)
    handler.close()
    assert handler.stream.getvalue().endswith(SHOW)


def test_a_file_has_one_line_for_each_stage(handler):
    handler.setStream(io.StringIO())
    for progress in (0.0, 0.5, 1.0):
        report(handler, "Converting", progress)
    (line,) = handler.stream.getvalue().splitlines()
    assert line.endswith("Converting")


def test_collectors_get_every_report(handler):
    handler.setStream(Terminal())
    handler.setFormatter(JsonFormatter())
    for progress in (0.0, 0.5, 1.0):
        report(handler, "Converting", progress)
    lines = [json.loads(line) for line in handler.stream.getvalue().splitlines()]
    assert [line["progress"] for line in lines] == [0.0, 0.5, 1.0]
