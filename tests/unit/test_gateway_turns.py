"""What the comparison of gateways reads from their answers, whatever pieces these come in."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.support.canned_upstream import paced_events
from benchmarks.support.connection_rounds import HUNG_UP, Lane, Turn
from benchmarks.support.gateways.gateway_bars import hold
from benchmarks.support.report import Report

BODY = b'{"content":" word word w"}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
STREAM = b"".join(paced_events(5))


class Wire(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


@contextmanager
def lane_of(*requests: bytes) -> Iterator[tuple[Lane, Turn, Wire]]:
    """A lane that has sent its first request."""
    loop = asyncio.new_event_loop()

    async def made() -> tuple[Lane, Turn, Wire]:
        turn, wire = Turn(), Wire()
        lane = Lane(iter(requests), turn)
        lane.connection_made(wire)
        lane.begin()
        return lane, turn, wire

    try:
        yield loop.run_until_complete(made())
    finally:
        loop.close()


@pytest.mark.parametrize("size", [1, 2, 7, 26, 1000])
@pytest.mark.parametrize(("answer", "words", "whole"), [(WHOLE, 2, 0), (STREAM, 5, 1)])
def test_an_answer_is_read_in_pieces_of_any_size(answer: bytes, words: int, whole: int, size: int) -> None:
    with lane_of(b"one", b"two") as (lane, turn, wire):
        for _ in range(2):
            for at in range(0, len(answer), size):
                lane.data_received(answer[at : at + size])
        assert lane.over.done()
        assert wire.written == [b"one", b"two"]
    assert turn.statuses == {200: 2}
    assert (turn.words, turn.whole) == (2 * words, 2 * whole)
    assert len(turn.latencies_s) == len(turn.first_s) == 2


def test_a_stream_without_its_end_is_not_whole() -> None:
    with lane_of(b"one") as (lane, turn, _):
        lane.data_received(STREAM.replace(b"data: [DONE]\n\n", b""))
    assert (turn.requests, turn.whole, turn.failures) == (1, 0, 0)


def test_a_connection_that_is_closed_is_a_failure() -> None:
    with lane_of(b"one") as (lane, turn, _):
        lane.data_received(STREAM[:-10])
        lane.connection_lost(None)
        assert lane.over.done()
    assert turn.statuses == {HUNG_UP: 1}
    assert turn.failures == 1


def test_a_ratio_has_a_bar_only_beside_a_gateway_that_was_measured_and_answered() -> None:
    report = Report("gateways", seed=1, quick=True)
    ours = {"per_s": 2_000.0, "cpu_us": 500.0, "failures": 0}
    others = {"litellm": {"per_s": 80.0}, "portkey": {"per_s": 0.0}}
    report.figures = {"parts": {"whole": {"gateways": {"maitred": ours, **others}}}}
    hold(report)
    bars = {bar.name: bar.met for bar in report.bars}
    assert bars["requests/s over litellm"]
    assert "requests/s over portkey" not in bars
    assert all(bars.values())
