"""Collecting an answer that is sent whole, and who may be poured to."""

import pytest

from maitred.api.exchange import HttpExchange
from maitred.api.http.connection import EXTENSION, PlainAsgiConnection
from maitred.api.recorded_exchange import RecordedExchange
from maitred.api.streaming import CollectedChoice, _ExchangeSink, send_response
from maitred.core.inference import TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason
from maitred.core.service import PushStream


def scored(offset: int) -> TokenScore:
    return TokenScore(chosen=TokenLogprob("a", b"a", -1.0), top=[], offset=offset)


def test_a_choice_is_the_sum_of_its_parts() -> None:
    choice = CollectedChoice()
    assert choice.scores is None
    first = [scored(0)]
    choice.add(TextDelta(0, "a", None, first))
    collected = choice.scores
    choice.add(TextDelta(0, "", FinishReason.STOP, [scored(1), scored(2)]))
    assert ("".join(choice.text), choice.finish) == ("a", FinishReason.STOP)
    assert choice.scores == [scored(0), scored(1), scored(2)]
    # Appended to, not copied: a copy for each token would cost the square of the answer's length.
    assert choice.scores is collected
    assert first == [scored(0)]


def test_a_recording_is_not_passed_by():
    """It shares the connection of its first reader; what goes there directly would be missing from what is kept."""

    class Ready(PlainAsgiConnection):
        ready = True

    scope = {"path": "/", "method": "POST", "headers": [], "extensions": {EXTENSION: Ready()}}
    call = HttpExchange(scope, None, None, 0.0)
    assert _ExchangeSink(call, None).open
    assert not _ExchangeSink(RecordedExchange(call, None, None), None).open


class Batches:
    """Two choices; counts how often it is asked."""

    def __init__(self):
        self.asked = 0
        self.batches = [
            [TextDelta(0, "a"), TextDelta(1, "b", FinishReason.STOP)],
            [TextDelta(0, "c"), TextDelta(0, "", FinishReason.LENGTH)],
        ]

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.asked += 1
        if self.asked > len(self.batches):
            raise StopAsyncIteration
        return self.batches[self.asked - 1]


class Poured(Batches, PushStream):
    def push_to(self, sink):
        raise AssertionError("it is not streamed")


class Texts:
    def whole(self, choices, usage):
        return ";".join("".join(choice.text) + f":{choice.finish}" for choice in choices).encode()


@pytest.mark.parametrize(("kind", "asked"), [(Poured, 2), (Batches, 3)])
async def test_an_answer_that_is_whole_is_not_asked_for_more_unless_it_may_wrap_another(kind, asked):
    sent = []

    async def send(message):
        sent.append(message)

    call, answer = HttpExchange({"path": "/", "method": "POST", "headers": []}, None, send, 0.0), kind()
    await send_response(call, answer, Texts(), choices=2, streams=False, heartbeat_s=1.0)
    assert sent[1]["body"] == b"ac:length;b:stop"
    assert answer.asked == asked


def test_an_answer_has_the_digits_of_its_request_unless_the_client_has_chosen_them():
    def named(*headers):
        call = HttpExchange({"path": "/", "method": "POST", "headers": headers}, None, None, 0.0)
        return call.context.request_id, call.id_for("chatcmpl")

    for headers in ((), ((b"x-request-id", b"not a safe one"),)):
        request_id, answer_id = named(*headers)
        assert request_id.startswith("req-")
        assert answer_id == request_id.replace("req-", "chatcmpl-")
    chosen = (b"x-request-id", b"req-1")
    first, second = named(chosen), named(chosen)
    assert first[0] == second[0] == "req-1"
    assert len({first[1], second[1], "chatcmpl-1"}) == 3
