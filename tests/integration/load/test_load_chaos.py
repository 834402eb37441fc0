"""Whole rehearsals: against a server that lies in each of the ways that must be caught, and against maitred itself."""

import asyncio
import functools
import json
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager

import msgspec
import psutil
import pytest
import uvloop
from aiohttp import web

from maitred.load.chaos.installation import free_port
from maitred.load.chaos.outcome import ChaosRun
from maitred.load.chaos.plan import ChaosPlan
from maitred.load.chaos.rehearsal import rehearse

WORDS = 12
GATEWAY = f"{sys.executable} -m tests.support.scripted_gateway --port {{port}}"
LOAD = {
    "target": {"model": "m"},
    "arrivals": {"users": 2, "spread_s": 0},
    "shape": {"prompt_tokens": "20", "output_tokens": str(WORDS)},
    "clients": {"retries": 0, "timeout_s": 3},
    "bounds": {"requests": 8},
}


LONG_ANSWERS = {"shape": {"prompt_tokens": "20", "output_tokens": "60"}, "bounds": {"duration_s": 5}}
"""Nearly all of the time every user is in the midst of an answer, also where the requests are slow to begin."""


def on_uvloop(test):
    """As the command line runs it."""

    @functools.wraps(test)
    def run(**arguments):
        uvloop.run(test(**arguments))

    return run


class LyingServer:
    """Answers with a word per token and keeps a meter. Once `lies`, it does one thing wrong with every third answer."""

    def __init__(self, lie):
        self.lie = lie
        self.lies = False
        self.answers = self.prompt_tokens = self.output_tokens = self.in_flight = 0
        self.url = ""

    async def models(self, request):
        return web.json_response({"data": [{"id": "m"}]})

    async def ready(self, request):
        return web.json_response({})

    async def metrics(self, request):
        values = {
            "maitred_prompt_tokens_total": self.prompt_tokens,
            "maitred_output_tokens_total": self.output_tokens,
            "maitred_engine_output_tokens_total": self.output_tokens,
            "maitred_in_flight": self.in_flight,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in values.items()))

    async def chat(self, request):
        question = await request.json()
        tokens = question["max_tokens"]
        prompt_tokens = sum(len(message["content"].split()) for message in question["messages"])
        seed = str(question["messages"])[-40:]
        words = [f"{hash(seed) % 9973}-{number} " for number in range(tokens)]
        self.answers += 1
        lie = self.lie if self.lies and self.answers % 3 == 0 else ""
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        self.prompt_tokens += prompt_tokens * (2 if lie == "bills the prompt twice" else 1)
        self.output_tokens += tokens * (2 if lie == "bills the answer twice" else 1)
        if lie == "leaks":
            self.in_flight += 1
        if not question.get("stream"):
            choice = {"message": {"content": "".join(words)}, "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage})
        return await self.stream(request, words, usage, lie)

    async def stream(self, request, words, usage, lie):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event):
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

        match lie:
            case "drops a token":
                del words[5]
            case "doubles a token":
                words.insert(5, words[5])
            case "ends early, as if whole":
                words, usage = words[:5], {**usage, "completion_tokens": 5}
            case "swaps two tokens":
                words[4], words[5] = words[5], words[4]
        for number, word in enumerate(words):
            if lie in ("cuts, as if whole", "cuts", "hangs", "doubles and cuts") and number == 6:
                break
            await send({"choices": [{"delta": {"content": word}}]})
            if lie == "doubles and cuts" and number == 3:
                await send({"choices": [{"delta": {"content": word}}]})
        if lie == "hangs":
            await asyncio.sleep(8)
        if lie == "cuts, as if whole":
            await send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        if lie not in ("cuts", "cuts, as if whole", "doubles and cuts", "hangs"):
            await send({"choices": [{"delta": {}, "finish_reason": "length"}]})
            await send({"choices": [], "usage": usage})
            await send("[DONE]")
        return response


@asynccontextmanager
async def lying(lie):
    server = LyingServer(lie)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health/ready", server.ready)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    server.url = f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def rehearsed(lie):
    async with lying(lie) as server:

        def lie_from_now_on(line):
            server.lies = server.lies or "with faults" in line

        plan = msgspec.convert(
            {
                "installation": {"url": server.url},
                "load": LOAD,
                "invariants": {"ends_within_s": 2, "nothing_left_s": 0.5},
            },
            ChaosPlan,
        )
        return await rehearse(plan, tell=lie_from_now_on)


def states(rehearsal):
    return {verdict.name: verdict.state for verdict in rehearsal.invariants}


@on_uvloop
async def test_an_honest_server_holds():
    rehearsal = await rehearsed("")
    assert rehearsal.exit_code == 0
    assert states(rehearsal) == {
        "faults played": "held",
        "no token lost or doubled": "held",
        "every request ends": "held",
        "no double bill": "held",
        "bounded overshoot": "held",
        "no budget overspent": "unchecked",
        "recovery": "unchecked",
        "throughput recovery": "unchecked",
        "nothing left": "held",
        "clean end": "unchecked",
    }


@pytest.mark.parametrize(
    ("lie", "promise", "says"),
    [
        ("drops a token", "no token lost or doubled", "is right"),
        ("doubles a token", "no token lost or doubled", "is right"),
        ("swaps two tokens", "no token lost or doubled", "is right"),
        ("ends early, as if whole", "no token lost or doubled", "characters are missing"),
        ("cuts, as if whole", "no token lost or doubled", "says that it is whole"),
        ("doubles and cuts", "no token lost or doubled", "It was cut, and from character"),
        ("hangs", "every request ends", "it took 3.0 s"),
        ("bills the answer twice", "no double bill", "output tokens more than can be explained"),
        ("bills the prompt twice", "no double bill", "prompt tokens more than can be explained"),
        ("leaks", "nothing left", "in flight"),
    ],
)
@on_uvloop
async def test_a_lie_is_caught(lie, promise, says):
    rehearsal = await rehearsed(lie)
    assert rehearsal.exit_code == 1
    broken = {verdict.name: verdict for verdict in rehearsal.broken}
    assert promise in broken
    assert any(says in example for example in broken[promise].examples)


@on_uvloop
async def test_an_honest_cut_is_no_lie():
    rehearsal = await rehearsed("cuts")
    assert rehearsal.chaos.summary.outcomes["cut"] == 2
    assert rehearsal.exit_code == 0


def plan_of(faults, *, installation=None, load=None, script=None, recoveries=5, **invariants):
    serve = f"{GATEWAY} --script '{json.dumps(script or {'step_s': 0.02})}' --set dispatch.recoveries={recoveries}"
    return msgspec.convert(
        {
            "installation": {"serve": serve} | (installation or {}),
            "load": {
                "arrivals": {"users": 3, "spread_s": 0.1},
                "shape": {"prompt_tokens": "20", "output_tokens": "20"},
                "bounds": {"duration_s": 4},
            }
            | (load or {}),
            "faults": faults,
            "invariants": {"throughput_recovery_s": None, "recovery_s": 10} | invariants,
        },
        ChaosPlan,
    )


@on_uvloop
async def test_a_killed_engine_costs_no_answer():
    rehearsal = await rehearse(plan_of([{"kind": "kill", "target": "engine", "at_s": 1}]))
    assert rehearsal.broken == []
    assert rehearsal.chaos.summary.outcomes == {"complete": len(rehearsal.chaos.requests.session)}


@on_uvloop
async def test_an_engine_that_is_killed_where_nothing_goes_on(tmp_path):
    plan = plan_of([{"kind": "kill", "target": "engine", "at_s": 1.5}], load=LONG_ANSWERS, recoveries=0)
    rehearsal = await rehearse(plan)
    assert rehearsal.broken == []
    assert rehearsal.chaos.summary.outcomes["cut"] >= 1
    assert rehearsal.calm.summary.outcomes == {"complete": len(rehearsal.calm.requests.session)}
    held = {name for name, state in states(rehearsal).items() if state == "held"}
    assert held >= {"no token lost or doubled", "every request ends", "no double bill", "recovery", "clean end"}
    (entry,) = rehearsal.faults
    assert entry.began_s >= 1.5
    rehearsal.save(tmp_path / "chaos.json")
    again = ChaosRun.load(tmp_path / "chaos.json")
    assert again.invariants == rehearsal.invariants
    assert again.faults == rehearsal.faults


@on_uvloop
async def test_a_hung_engine_is_waited_for_and_then_all_is_whole():
    """Nobody notices it yet: the streams stand still until it goes on."""
    rehearsal = await rehearse(plan_of([{"kind": "hang", "target": "engine", "at_s": 1, "for_s": 1}]))
    assert rehearsal.broken == []
    assert set(rehearsal.chaos.summary.outcomes) == {"complete"}
    assert rehearsal.chaos.e2e_s().max() >= 1.0


@on_uvloop
async def test_a_gateway_that_is_killed_is_started_again():
    plan = plan_of(
        [{"kind": "kill", "target": "gateway", "at_s": 1.5, "for_s": 0.5}],
        load=LONG_ANSWERS | {"arrivals": {"users": 2}, "clients": {"retries": 10}},
        recovery_s=30,
    )
    rehearsal = await rehearse(plan)
    assert rehearsal.broken == []
    assert any("started again" in line for line in rehearsal.faults[0].said)
    assert rehearsal.chaos.summary.outcomes["cut"] >= 1


@on_uvloop
async def test_a_gateway_that_stays_dead_is_reported():
    rehearsal = await rehearse(plan_of([{"kind": "kill", "target": "gateway", "at_s": 1}], nothing_left_s=1))
    broken = {verdict.name for verdict in rehearsal.broken}
    assert broken == {"recovery", "nothing left", "clean end"}


@on_uvloop
async def test_a_link_that_breaks_and_clients_that_leave():
    faults = [
        {"kind": "partition", "target": "front", "at_s": 0.5, "for_s": 1},
        {"kind": "partition", "target": "front", "at_s": 2, "for_s": 0.5, "how": "reset"},
        {"kind": "leave", "clients": 10, "after_s": 0.1, "at_s": 3},
        {"kind": "stall", "clients": 3, "for_s": 1, "at_s": 4},
    ]
    rehearsal = await rehearse(
        plan_of(
            faults,
            installation={"links": {"front": {}}, "clients_through": "front"},
            load={"bounds": {"duration_s": 5.5}},
        )
    )
    assert rehearsal.broken == []
    notes = [" ".join(entry.said) for entry in rehearsal.faults]
    assert notes[2] == "10 users: 10 cancelled"
    assert notes[3] == "3 users: 3 complete"


@on_uvloop
async def test_a_fault_whose_target_is_gone_is_reported():
    faults = [
        {"kind": "kill", "target": "gateway", "at_s": 0.5},
        {"kind": "hang", "target": "engine", "at_s": 2, "for_s": 1},
    ]
    rehearsal = await rehearse(plan_of(faults, nothing_left_s=0.5))
    verdict = next(verdict for verdict in rehearsal.broken if verdict.name == "faults played")
    # On a busy machine both faults can be due at once: the gateway is there for another moment, without its engine.
    (example,) = verdict.examples
    assert example.removeprefix("fault 1 (hang): ") in (
        "No process plays the role 'gateway' now.",
        "No process below 'gateway' has 'engine' in its command line now.",
    )


RUN = """
import sys
import msgspec, uvloop
from maitred.load.chaos.plan import ChaosPlan
from maitred.load.chaos.rehearsal import rehearse
plan = msgspec.json.decode(sys.argv[1], type=ChaosPlan)
uvloop.run(rehearse(plan, tell=lambda line: print(line, flush=True)))
"""


@contextmanager
def rehearsing(plan):
    with subprocess.Popen(
        [sys.executable, "-c", RUN, msgspec.json.encode(plan).decode()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_interrupts_a_rehearsal_gets_everything_undone(number):
    """The installation ran before, and it must go on running as if nothing had been."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tests.support.scripted_gateway",
        "--port",
        str(port),
        "--script",
        '{"step_s": 0.02}',
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as gateway:
        seen = psutil.Process(gateway.pid)
        try:
            limits = seen.rlimit(psutil.RLIMIT_FSIZE)
            plan = plan_of(
                [
                    {"kind": "hang", "target": "gateway", "at_s": 1, "for_s": 100},
                    {"kind": "disk_full", "target": "gateway", "at_s": 1, "for_s": 100},
                ],
                installation={"serve": None, "pid": gateway.pid, "url": f"http://127.0.0.1:{port}"},
                load={"bounds": {"duration_s": 2}},
            )
            with rehearsing(plan) as process:
                for line in process.stdout:
                    if "stopped process" in line:
                        break
                deadline_s = time.monotonic() + 300
                while seen.status() != psutil.STATUS_STOPPED or seen.rlimit(psutil.RLIMIT_FSIZE) == limits:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
                process.send_signal(number)
                assert process.wait(20) != 0
            assert seen.status() != psutil.STATUS_STOPPED
            assert seen.rlimit(psutil.RLIMIT_FSIZE) == limits
        finally:
            gateway.terminate()
            assert gateway.wait(30) == 0


def test_whoever_interrupts_a_rehearsal_leaves_no_process_behind():
    plan = plan_of([{"kind": "hang", "target": "engine", "at_s": 1, "for_s": 100}])
    with rehearsing(plan) as process:
        for line in process.stdout:
            if "stopped process" in line:
                break
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
        assert not any(child.is_running() for child in started)
