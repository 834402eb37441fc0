"""The scripted server's pure parts: its timetable, its script, the bytes of its answers."""

import statistics

import msgspec
import pytest

from maitred.testing.scripted_openai import (
    DelayDistribution,
    FaultKind,
    ScriptedFault,
    ScriptedPause,
    ServedRecord,
    ServerScript,
)
from maitred.testing.scripted_openai.answers import AnswerFactory
from maitred.testing.scripted_openai.odd_stream import StreamEnding
from maitred.testing.scripted_openai.timetable import BUCKET_S, DeliverySchedule
from maitred.testing.scripted_openai.truth import SendLateness
from maitred.wire.sse import SSEDecoder

CHAT = msgspec.json.encode(
    {"messages": [{"role": "user", "content": "one two  three"}], "max_tokens": 5, "stream": True}
)
WHOLE = CHAT.replace(b"true", b"false")
USAGE = CHAT.replace(b'"stream":', b'"stream_options":{"include_usage":true},"stream":')


def answer(script=None, body=CHAT, number=0, chat=True):
    return AnswerFactory(script or ServerScript()).answer(number, chat=chat, body=body)


def body_of(data):
    """The body of a chunked response, and whether it ended as it should."""
    rest = data.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if size == b"0":
            assert rest == b"\r\n"
            return body, True
        count = int(size, 16)
        body += rest[:count]
        assert rest[count : count + 2] == b"\r\n"
        rest = rest[count + 2 :]
    return body, False


def sent(answer):
    body, ended = body_of(answer.head + b"".join(answer.sends))
    return [event.data for event in SSEDecoder().feed(body)], ended


def text_of(events):
    choices = [choice for data in events if data.startswith('{"id"') for choice in msgspec.json.decode(data)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


class TestTimetable:
    def test_things_leave_in_order_never_early_and_at_most_one_bucket_late(self):
        timetable = DeliverySchedule()
        for number in range(200):
            due_s = 100 + number * 37 % 200 * 0.00013
            timetable.add(due_s, due_s)
        left = []
        while timetable.next_s < float("inf"):
            now_s = timetable.next_s
            for due_s in timetable.take(now_s):
                assert due_s < now_s <= due_s + BUCKET_S + 1e-9
                left.append(now_s)
        assert len(left) == 200
        assert left == sorted(left)

    def test_nothing_is_taken_before_its_time(self):
        timetable = DeliverySchedule()
        assert timetable.next_s == float("inf")
        timetable.add("a", 1.0)
        assert timetable.take(1.0) == []
        assert timetable.take(timetable.next_s) == ["a"]
        assert timetable.take(2.0) == []

    def test_what_is_added_again_comes_again(self):
        timetable = DeliverySchedule()
        timetable.add("a", 1.0)
        timetable.take(5.0)
        timetable.add("a", 1.0)
        assert timetable.take(5.0) == ["a"]


class TestTimes:
    def test_a_fixed_time_is_the_mean_times_the_factor(self):
        rng = ServerScript().rng_of(0)
        assert DelayDistribution(mean_s=0.2, factor=1.1).draw(rng) == pytest.approx(0.22)
        assert set(DelayDistribution(mean_s=0.2, factor=2).table(rng)) == {0.4}

    def test_lognormal_times_have_the_mean_and_the_variation_asked_for(self):
        times = DelayDistribution(mean_s=0.2, cv=0.5)
        table = times.table(ServerScript().rng_of(0))
        assert statistics.fmean(table) == pytest.approx(0.2, rel=0.001)
        assert statistics.pstdev(table) / 0.2 == pytest.approx(0.5, rel=0.01)
        rng = ServerScript().rng_of(0)
        drawn = [times.draw(rng) for _ in range(20_000)]
        assert statistics.fmean(drawn) == pytest.approx(0.2, rel=0.02)
        assert statistics.pstdev(drawn) / 0.2 == pytest.approx(0.5, rel=0.05)

    def test_the_factor_keeps_the_draws(self):
        plain, slow = DelayDistribution(mean_s=0.2, cv=0.5), DelayDistribution(mean_s=0.2, cv=0.5, factor=1.1)
        assert slow.draw(ServerScript().rng_of(3)) == pytest.approx(1.1 * plain.draw(ServerScript().rng_of(3)))


class TestScript:
    def test_the_same_seed_does_the_same_to_the_same_request(self):
        script = ServerScript(ttft=DelayDistribution(mean_s=0.1, cv=1), itl=DelayDistribution(mean_s=0.1, cv=1), seed=5)
        gaps = [answer(script, number=number).gaps_s for number in (7, 7, 8)]
        assert gaps[0] == gaps[1] != gaps[2]
        other = msgspec.structs.replace(script, seed=6)
        assert gaps[0] != answer(other, number=7).gaps_s

    def test_faults_meet_numbers_and_shares(self):
        script = ServerScript(
            faults=[ScriptedFault(kind=FaultKind.CUT, requests=[3]), ScriptedFault(kind=FaultKind.STATUS, share=0.25)],
            seed=1,
        )
        kinds = [[fault.kind for fault in script.faults_of(n, script.rng_of(n))] for n in range(2000)]
        assert FaultKind.CUT in kinds[3]
        assert sum(FaultKind.CUT in kind for kind in kinds) == 1
        assert sum(FaultKind.STATUS in kind for kind in kinds) == pytest.approx(500, rel=0.15)

    def test_json_is_read_strictly(self):
        text = b'{"ttft": {"mean_s": 0.1, "cv": 0.3}, "pauses": [{"at_s": 1, "for_s": 2}], "faults": [{"kind": "cut"}]}'
        script = msgspec.json.decode(text, type=ServerScript)
        assert script.pauses == [ScriptedPause(at_s=1, for_s=2)]
        assert msgspec.json.decode(msgspec.json.encode(script), type=ServerScript) == script
        for wrong in (b'{"ttfb": 1}', b'{"faults": [{"kind": "cat"}]}', b'{"pauses": [{"at_s": -1, "for_s": 1}]}'):
            with pytest.raises(msgspec.ValidationError):
                msgspec.json.decode(wrong, type=ServerScript)


class TestAnswers:
    def test_a_stream_counts_and_ends(self):
        events, ended = sent(answer(body=USAGE))
        assert ended
        assert text_of(events) == "0 1 2 3 4"
        assert events[-1] == "[DONE]"
        assert msgspec.json.decode(events[-2])["usage"] == {
            "prompt_tokens": 3 + 4,
            "completion_tokens": 5,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert "usage" not in "".join(sent(answer())[0])

    def test_the_gaps_are_the_scripts(self):
        script = ServerScript(ttft=DelayDistribution(mean_s=0.5), itl=DelayDistribution(mean_s=0.01))
        assert answer(script).gaps_s == [0.5, 0.01, 0.01, 0.01, 0.01]
        assert answer(script, WHOLE).gaps_s == [pytest.approx(0.54)]

    def test_gaps_go_on_beyond_the_table(self):
        body = CHAT.replace(b":5", b":50000")
        long = answer(ServerScript(itl=DelayDistribution(mean_s=1, cv=1)), body)
        assert len(long.gaps_s) == len(long.sends) == 50_000

    def test_several_tokens_in_an_event(self):
        assert len(answer(ServerScript(tokens_per_event=2)).sends) == 3
        assert text_of(sent(answer(ServerScript(tokens_per_event=2)))[0]) == "0 1 2 3 4"

    def test_a_completion_of_text(self):
        body = msgspec.json.encode({"prompt": ["one two", "three"], "max_tokens": 3})
        (data,) = answer(body=body, chat=False).sends
        whole = msgspec.json.decode(data.partition(b"\r\n\r\n")[2])
        assert whole["choices"][0]["text"] == "0 1 2"
        assert whole["usage"]["prompt_tokens"] == 7

    def test_max_completion_tokens_and_the_default(self):
        assert answer(body=CHAT.replace(b"max_tokens", b"max_completion_tokens")).answer_tokens == 5
        assert answer(ServerScript(default_tokens=9), CHAT.replace(b'"max_tokens":5,', b"")).answer_tokens == 9

    def test_strict_refuses_what_openai_does_not_know(self):
        body = CHAT.replace(b'"stream"', b'"ignore_eos":true,"stream"')
        assert answer(body=body).status == 200
        refused = answer(ServerScript(strict=True), body)
        assert refused.status == 400
        assert b"ignore_eos" in refused.head
        assert answer(ServerScript(strict=True)).status == 200

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"max_tokens": "many"}', b"\xff"])
    @pytest.mark.parametrize("strict", [False, True])
    def test_a_body_that_is_no_request_is_refused(self, body, strict):
        assert answer(ServerScript(strict=strict), body).status == 400


def faulty(kind, body=CHAT, **fields):
    return answer(ServerScript(faults=[ScriptedFault(kind=kind, requests=[0], **fields)]), body)


class TestFaults:
    def test_status(self):
        refused = faulty(FaultKind.STATUS, status=429, headers={"retry-after": "1"})
        assert refused.head.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in refused.head
        assert refused.sends == []

    @pytest.mark.parametrize(("kind", "ending"), [("cut", StreamEnding.CLOSE), ("reset", StreamEnding.RESET)])
    def test_cut(self, kind, ending):
        cut = faulty(FaultKind(kind), after=2)
        assert cut.ending is ending
        events, ended = sent(cut)
        assert not ended
        assert text_of(events) == "0 1"

    def test_cut_before_and_after_everything(self):
        assert text_of(sent(faulty(FaultKind.CUT, after=0))[0]) == ""
        events, ended = sent(faulty(FaultKind.CUT, after=99))
        assert (text_of(events), ended, "[DONE]" in events) == ("0 1 2 3 4", False, False)

    @pytest.mark.parametrize("after", [0, 3, 99])
    def test_an_end_that_looks_clean(self, after):
        events, ended = sent(faulty(FaultKind.NO_DONE, USAGE, after=after))
        assert ended
        assert "[DONE]" not in events
        assert text_of(events) == "0 1 2 3 4"[: max(0, 2 * min(after, 5) - 1)]
        assert ("usage" in events[-1]) == (after == 99)

    def test_error_event(self):
        events, ended = sent(faulty(FaultKind.ERROR_EVENT, after=2))
        assert ended
        assert msgspec.json.decode(events[-1])["error"]["message"]
        assert text_of(events[:-1]) == "0 1"

    def test_stall(self):
        stalled = faulty(FaultKind.STALL, after=2)
        assert stalled.ending is StreamEnding.STALL
        assert len(stalled.sends) == 2
        assert [gap_s > 3 for gap_s in faulty(FaultKind.STALL, after=2, for_s=3).gaps_s] == [0, 0, 1, 0, 0]

    @pytest.mark.parametrize("after", [0, 2, 99])
    def test_garbage(self, after):
        events, ended = sent(faulty(FaultKind.GARBAGE, after=after))
        assert ended
        assert events[-1] == "[DONE]"
        assert "{oops" in events
        assert text_of(events) == "0 1 2 3 4"

    @pytest.mark.parametrize(
        "kinds", [["crlf"], ["split"], ["pings"], ["bunched"], ["bunched", "pings", "crlf", "split"]]
    )
    def test_odd_but_whole(self, kinds):
        faults = [ScriptedFault(kind=FaultKind(kind), requests=[0]) for kind in kinds]
        odd = answer(ServerScript(faults=faults), USAGE)
        assert sum(odd.events_per_send) == 5
        assert len(odd.sends) == len(odd.gaps_s) == len(odd.events_per_send)
        events, ended = sent(odd)
        assert ended
        assert events == sent(answer(body=USAGE))[0]
        assert sum(odd.gaps_s) == pytest.approx(0.05 + 4 * 0.02, abs=0.05)

    @pytest.mark.parametrize("kind", ["cut", "garbage", "no_done", "error_event", "reset"])
    def test_answers_in_one_piece_have_faults_too(self, kind):
        (data,) = faulty(FaultKind(kind), WHOLE).sends
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(data.partition(b"\r\n\r\n")[2])


class TestTruth:
    def test_lateness(self):
        lateness = SendLateness.of(value / 100 for value in range(100))
        assert (lateness.count, lateness.p50_s, lateness.p99_s, lateness.max_s) == (100, 0.5, 0.99, 0.99)
        assert SendLateness.of([]).count == 0

    def test_the_log_is_json(self):
        truth = ServedRecord(requests=[], unix_minus_monotonic_s=1.0, cpu_seconds=0.0, lateness=SendLateness(count=0))
        assert ServedRecord.load(msgspec.json.encode(truth)) == truth


def test_a_fault_can_be_of_a_model():
    script = ServerScript(faults=[ScriptedFault(kind=FaultKind.STATUS, models=["broken"], status=500)])
    asked = [
        answer(script, msgspec.json.encode({"model": model, "prompt": "a"}), chat=False) for model in ("broken", "m")
    ]
    assert [response.status for response in asked] == [500, 200]
