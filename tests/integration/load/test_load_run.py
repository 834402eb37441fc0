"""Whole runs of the tester against the scripted server."""

import asyncio
import signal
from itertools import pairwise

import msgspec
import pytest

from maitred.core.errors import InvalidRequest, Unavailable
from maitred.load.measure.record import UserOutcome
from maitred.load.play.driver import run
from maitred.load.spec import ArrivalsSpec, ClientsSpec, LoadSpec, LoadTarget, LoadTenant, ShapeSpec, StopCondition
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.testing.scripted_openai import (
    DelayDistribution,
    FaultKind,
    ScriptedFault,
    ServerScript,
    scripted_openai,
)

TURN = SessionTurn(prompt_tokens=20, output_tokens=5)


def spec(url, **sections):
    return LoadSpec(target=LoadTarget(url=url), **sections)


def questions(*times_s, turn=TURN, tenant="default"):
    return Workload(
        iter([LoadSession(id=n, turns=(turn,), at_s=at_s, tenant=tenant) for n, at_s in enumerate(times_s)])
    )


@pytest.fixture(scope="module")
def server():
    with scripted_openai(
        ServerScript(ttft=DelayDistribution(mean_s=0.05), itl=DelayDistribution(mean_s=0.02))
    ) as server:
        yield server


class LoopLag:
    """Delay of this process with what it has to do, as its own timer finds it."""

    most_s = 0.0

    async def measure(self):
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + 0.002
            await asyncio.sleep(0.002)
            self.most_s = max(self.most_s, loop.time() - due_s)


@pytest.fixture
async def lag():
    lag = LoopLag()
    measuring = asyncio.create_task(lag.measure())
    yield lag
    measuring.cancel()


async def test_every_request_goes_out_when_it_is_due_and_comes_back_whole(server, lag):
    due_s = [0.0, 0.1, 0.1, 0.35]
    data = await run(spec(server.url), questions(*due_s))
    assert [record.intended_s for record in data.records] == due_s
    for record in data.records:
        assert (record.outcome, record.error, record.attempts) == (UserOutcome.COMPLETE, "", 1)
        assert (record.output_tokens, len(record.arrivals_s)) == (5, 5)
        assert -0.001 <= record.late_s < 0.05 + lag.most_s
        assert record.arrivals_s[0] - record.sent_s > 0.049
    assert data.model == "scripted"
    assert data.seconds > 0.35 + 0.05 + 4 * 0.02 - 0.001


async def test_prompts_have_the_length_that_was_asked_by_the_servers_own_count(server):
    turns = [SessionTurn(prompt_tokens=tokens, output_tokens=1) for tokens in (10, 77, 300)]
    sessions = [LoadSession(id=n, turns=(turn,), at_s=0.0) for n, turn in enumerate(turns)]
    data = await run(spec(server.url), Workload(iter(sessions)))
    assert sorted(record.prompt_tokens for record in data.records) == [10, 77, 300]


async def test_words_are_new_in_every_run_unless_their_seed_is_given(server):
    seeds = [
        (await run(spec(server.url, shape=ShapeSpec(text_seed=given)), questions(0.0))).text_seed
        for given in (None, None, 7)
    ]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7


async def test_a_closed_loop_has_one_request_per_user(server):
    most = 0

    def watch(progress):
        nonlocal most
        most = max(most, progress.open)

    spec_ = spec(
        server.url,
        arrivals=ArrivalsSpec(users=7, spread_s=0.1),
        shape=ShapeSpec(prompt_tokens="20", output_tokens="5"),
        bounds=StopCondition(duration_s=1.5),
    )
    data = await run(spec_, watch=watch)
    by_start = sorted(data.records, key=lambda record: record.intended_s)
    edges = sorted([(r.intended_s, 1) for r in by_start] + [(r.ended_s, -1) for r in by_start])
    level = peak = 0
    for _, change in edges:
        level += change
        peak = max(peak, level)
    assert peak <= 7
    assert 1 <= most <= 7
    assert all(record.outcome is UserOutcome.COMPLETE for record in by_start)
    assert len(by_start) > 7 * 2  # an answer takes 0.13 s on a quiet machine


async def test_a_run_ends_with_its_requests(server):
    spec_ = spec(server.url, arrivals=ArrivalsSpec(users=4), bounds=StopCondition(requests=9))
    spec_ = msgspec.structs.replace(spec_, shape=ShapeSpec(prompt_tokens="20", output_tokens="2"))
    data = await run(spec_)
    assert [record.outcome for record in data.records] == [UserOutcome.COMPLETE] * 9


async def test_a_user_reads_thinks_and_asks_on_with_the_conversation_so_far(server):
    turns = (
        TURN,
        SessionTurn(prompt_tokens=20, output_tokens=5, think_s=0.2),
        SessionTurn(prompt_tokens=20, output_tokens=5),
    )
    session = LoadSession(id=0, turns=turns, at_s=0.0, prefix=3, prefix_tokens=30)
    first, second, third = (await run(spec(server.url), Workload(iter([session])))).records
    assert second.intended_s == pytest.approx(first.ended_s + 0.2)
    assert third.intended_s == pytest.approx(second.ended_s)
    assert first.prompt_tokens < second.prompt_tokens < third.prompt_tokens


async def test_a_server_that_pauses_cannot_hide_it():
    """What was due during a pause has waited since then, whenever the tester got to send it."""
    with scripted_openai(ServerScript(ttft=DelayDistribution(mean_s=0.02))) as server:
        loop, stopped = asyncio.get_running_loop(), []

        def stop_once(progress):
            if not stopped and progress.open:
                stopped.append(server.process.send_signal(signal.SIGSTOP))
                loop.call_later(1.0, server.process.send_signal, signal.SIGCONT)

        due_s = [number * 0.05 for number in range(100)]
        settings = spec(server.url, clients=ClientsSpec(max_open=4))
        data = await run(settings, questions(*due_s), watch=stop_once)
    waits_s = sorted(record.arrivals_s[0] - record.intended_s for record in data.records)
    assert waits_s[-1] > 0.8, "the first, whose answer stood still"
    assert sum(wait_s > 0.25 for wait_s in waits_s) >= 12  # of the twenty that were due in the pause


async def test_who_waits_for_a_place_is_counted_as_waiting(server, lag):
    data = await run(spec(server.url, clients=ClientsSpec(max_open=1)), questions(0.0, 0.0, 0.0))
    ttfts_s = [record.arrivals_s[0] - record.intended_s for record in data.records]
    assert all(ttft_s > least_s for ttft_s, least_s in zip(ttfts_s, (0.049, 0.179, 0.309), strict=True))
    assert all(record.late_s < 0.05 + lag.most_s for record in data.records)
    for former, later in pairwise(data.records):
        assert later.arrivals_s[0] > former.ended_s


async def test_what_is_open_after_the_grace_is_unfinished(lag):
    with scripted_openai(ServerScript(faults=[ScriptedFault(kind=FaultKind.STALL, requests=[3])])) as server:
        data = await run(spec(server.url, bounds=StopCondition(duration_s=0.5, drain_s=0.3)), questions(0.0, 0.1))
    assert [record.outcome for record in data.records] == [UserOutcome.COMPLETE, UserOutcome.UNFINISHED]
    assert 0.799 < data.records[1].ended_s < 0.9 + lag.most_s
    assert len(data.records[1].arrivals_s) == 1


async def test_a_run_that_is_stopped_waits_for_what_is_open(server):
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, stop.set)
    long = SessionTurn(prompt_tokens=20, output_tokens=100)
    data = await run(spec(server.url), questions(0.0, 60.0, turn=long), stop=stop)
    assert [(record.outcome, len(record.arrivals_s)) for record in data.records] == [(UserOutcome.COMPLETE, 100)]
    assert data.seconds < 60, "the second is not waited for"


async def test_users_leave_and_stall_by_lot(server, lag):
    long = SessionTurn(prompt_tokens=20, output_tokens=50)  # nobody comes to its end before others leave
    clients = ClientsSpec(cancel_share=0.5, cancel_after_s="0.06", stall_share=0.3, stall_s=0.2)
    data = await run(spec(server.url, clients=clients), questions(*[n * 0.01 for n in range(40)], turn=long))
    left = [record for record in data.records if record.outcome is UserOutcome.CANCELLED]
    assert 10 <= len(left) <= 30
    assert all(0.059 < record.ended_s - record.sent_s < 0.11 + lag.most_s for record in left)
    assert {record.outcome for record in data.records} == {UserOutcome.CANCELLED, UserOutcome.COMPLETE}


async def test_tenants_are_named_to_the_server():
    with scripted_openai() as server:
        tenants = {"gold": LoadTenant(share=1), "free": LoadTenant(share=3)}
        await run(spec(server.url, tenants=tenants), questions(0.0, 0.1, tenant="gold"))
        users = [request.user for request in server.truth().requests]
    assert users.count("gold") == 2


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_both_apis_with_and_without_streaming(server, endpoint, stream):
    target = LoadTarget(url=server.url, endpoint=endpoint, stream=stream)
    data = await run(LoadSpec(target=target), questions(0.0), keep_text=True)
    (record,) = data.records
    assert (record.outcome, record.output_tokens) == (UserOutcome.COMPLETE, 5)
    assert len(record.arrivals_s) == (5 if stream else 0)
    assert len("".join(record.text).split()) == 5


async def test_a_server_that_refuses_foreign_fields_is_asked_without_them():
    with scripted_openai(ServerScript(strict=True)) as server:
        data = await run(spec(server.url), questions(0.0))
        assert data.records[0].outcome is UserOutcome.COMPLETE
        with pytest.raises(InvalidRequest, match="refuses a first small request"):
            await run(LoadSpec(target=LoadTarget(url=server.url, exact_output="always")), questions(0.0))


async def test_a_unix_socket_in_place_of_host_and_port():
    with scripted_openai(ServerScript(), unix=True) as server:
        target = LoadTarget(url=server.url, unix_socket=server.unix_socket)
        data = await run(LoadSpec(target=target), questions(0.0, 0.1))
        assert [record.outcome for record in data.records] == [UserOutcome.COMPLETE] * 2
    with pytest.raises(Unavailable, match=r"nothing\.sock"):
        await run(LoadSpec(target=LoadTarget(unix_socket="/tmp/nothing.sock")), questions(0.0))


async def test_a_target_that_is_not_there_says_so():
    with pytest.raises(Unavailable, match=r"Nothing answers at 127\.0\.0\.1:1"):
        await run(spec("http://127.0.0.1:1"), questions(0.0))
    with pytest.raises(InvalidRequest, match="not an address"):
        await run(spec("localhost"), questions(0.0))


async def test_failures_are_outcomes_not_exceptions():
    # 0 and 1 are calibration. A kept connection that closes is replaced at once, so closing takes two.
    kinds = [FaultKind.CUT, FaultKind.NO_DONE, FaultKind.ERROR_EVENT, FaultKind.GARBAGE, FaultKind.RESET]
    faults = [ScriptedFault(kind=kind, requests=[2 + place]) for place, kind in enumerate(kinds)]
    faults += [
        ScriptedFault(kind=FaultKind.STATUS, requests=[7], status=400),
        ScriptedFault(kind=FaultKind.CLOSE, requests=[8, 9]),
    ]
    with scripted_openai(ServerScript(faults=faults)) as server:
        data = await run(
            spec(server.url, clients=ClientsSpec(retries=0)), questions(*[number * 0.1 for number in range(8)])
        )
    outcomes = [record.outcome for record in data.records]
    assert outcomes == [UserOutcome.CUT] * 5 + [UserOutcome.REFUSED, UserOutcome.FAILED, UserOutcome.COMPLETE]
    assert all(record.error for record in data.records[:7])


@pytest.mark.parametrize("kind", [FaultKind.BUNCHED, FaultKind.PINGS, FaultKind.CRLF, FaultKind.SPLIT])
async def test_odd_streams_are_read_whole(kind):
    with scripted_openai(ServerScript(faults=[ScriptedFault(kind=kind, share=1.0)])) as server:
        data = await run(spec(server.url), questions(0.0, turn=SessionTurn(prompt_tokens=20, output_tokens=9)))
    (record,) = data.records
    assert (record.outcome, len(record.arrivals_s), record.output_tokens) == (UserOutcome.COMPLETE, 9, 9)
