"""Real processes: an engine is started, killed, restarted, stopped, orphaned."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import uvloop

from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.request import EngineRequest, SamplingParams
from maitred.fleet.local import LinkAddress, LocalEngine
from maitred.fleet.process import Backoff
from maitred.replica.engine.client import EngineClient
from maitred.scaling.replica_status import ReplicaPhase
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.wire.link.credentials import Credentials
from tests.support.processes import living_children

LIMIT_S = 300.0
STALLS = {"fault": "stall", "fault_after": 1}


def scripted(*answers, **script):
    if answers:
        script["answers"] = list(answers)

    def command(address):
        module = "maitred.testing.scripted_engine"
        return [sys.executable, "-m", module, "--listen", address, "--script", json.dumps(script)]

    return command


def python(code):
    return lambda address: [sys.executable, "-c", code, address]


def request(name="r", n=1):
    return EngineRequest(name, [5, 6, 7], SamplingParams(max_tokens=4, seed=0, n=n))


class Pauses:
    """Stands in for sleep: notes the wait, and lets go when the test says so."""

    def __init__(self, *, hold=False):
        self.asked_s = []
        self.go = asyncio.Event()
        self.asked = asyncio.Event()
        if not hold:
            self.go.set()

    async def __call__(self, seconds):
        self.asked_s.append(seconds)
        self.asked.set()
        await self.go.wait()


async def answer(engine, **options):
    async with engine.client.generate(request(**options)) as stream:
        return [token async for batch in stream for delta in batch for token in delta.tokens]


async def restarted(engine, times):
    async with asyncio.timeout(LIMIT_S):
        while engine.restarts < times or not engine.client.is_ready:  # noqa: ASYNC110 - a process has no event
            await asyncio.sleep(0.01)


async def test_serves_and_leaves_nothing_behind(short_folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    async with LocalEngine(scripted()) as engine:
        await engine.wait_started()
        (folder,) = short_folder.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert engine.client.card().name == "scripted"
        assert await answer(engine) == [5, 6, 7, 5]
        assert engine.predicted_ready_s() == 0
        pid = engine.pid
    assert not psutil.pid_exists(pid)
    assert list(short_folder.iterdir()) == []
    assert engine.restarts == 0
    assert engine.client.open_streams == 0


async def test_what_a_killed_gateway_left_is_swept_up(short_folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    beyond_all_pids = (1 << 22) + 1
    orphaned = short_folder / f"maitred-{beyond_all_pids}-{'0' * 16}"
    alive = short_folder / f"maitred-{os.getpid()}-{'0' * 16}"
    foreign = short_folder / "maitred-notes"
    for folder in (orphaned, alive, foreign):
        folder.mkdir()
    async with LocalEngine(scripted()):
        assert not orphaned.exists()
    assert sorted(short_folder.iterdir()) == sorted([alive, foreign])


async def test_while_it_starts_it_says_for_how_long():
    async with LocalEngine(scripted(load_s=0.3), expected_start_s=30) as engine:
        with pytest.raises(ReplicaUnavailable) as refusal:
            engine.client.card()
        assert 25 < refusal.value.retry_after_s <= 30
        await engine.wait_started()
        assert engine.client.is_ready


@pytest.mark.parametrize(
    ("served", "asked_s"), [([], [5.0]), ([True, True], [5.0, 1.0, 1.0]), ([True] * 9, [5.0, 1, 1, 1, 0.5])]
)
async def test_a_long_pause_before_a_new_start_ends_when_nobody_else_serves(served, asked_s):
    pauses, serving = Pauses(), iter(served)
    backoff = Backoff(first_s=8.5)
    engine = LocalEngine(
        scripted({"fault": "die"}), sleep=pauses, backoff=backoff, others_serve=lambda: next(serving, False)
    )
    await engine._wait_backoff(backoff.wait_s(0))
    assert pauses.asked_s == asked_s


async def test_a_killed_engine_fails_every_stream_at_once_and_comes_back():
    pauses = Pauses(hold=True)
    async with LocalEngine(scripted(STALLS), sleep=pauses, backoff=Backoff(first_s=3)) as engine:
        await engine.wait_started()
        first_tokens = asyncio.Semaphore(0)

        async def read(name):
            async with engine.client.generate(request(name)) as stream:
                await anext(stream)
                first_tokens.release()
                with pytest.raises(ReplicaLost):
                    await anext(stream)
                return time.monotonic()

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(read(f"r{i}")) for i in range(50)]
            for _ in readers:
                await first_tokens.acquire()
            killed_s = time.monotonic()
            os.kill(engine.pid, signal.SIGKILL)
        slowest_s = max(reader.result() for reader in readers) - killed_s
        print(f"50 streams knew {slowest_s * 1e3:.1f} ms after the kill")
        assert slowest_s < LIMIT_S  # typically 2 ms
        assert engine.client.open_streams == 0

        await pauses.asked.wait()
        assert pauses.asked_s == [3]
        with pytest.raises(ReplicaUnavailable) as refusal:
            await answer(engine)
        assert 3 < refusal.value.retry_after_s < 3 + LIMIT_S
        pauses.go.set()
        await restarted(engine, 1)
        async with engine.client.generate(request()) as stream:
            assert await anext(stream)


async def test_restarts_again_and_again_with_growing_pauses():
    pauses = Pauses()
    async with LocalEngine(scripted({"fault": "die"}), sleep=pauses, backoff=Backoff(first_s=1)) as engine:
        await engine.wait_started()
        epochs = {engine.client.epoch}
        for life in range(1, 4):
            with pytest.raises(ReplicaLost):
                await answer(engine)
            await restarted(engine, life)
            epochs.add(engine.client.epoch)
        assert pauses.asked_s == [1, 2, 4]
        assert len(epochs) == 4


async def test_an_engine_of_somebody_else_at_its_address_is_not_taken_for_its_own():
    """It may be that of another agent of this machine, or one that a killed agent has left."""
    idle, pauses = python("import time; time.sleep(60)"), Pauses(hold=True)
    async with ScriptedEngine() as foreign:
        listens_at = LinkAddress(foreign.address, Credentials())
        async with LocalEngine(
            idle, listens_at=listens_at, retries_first=lambda: True, sleep=pauses, stop_grace_s=0
        ) as engine:
            await asyncio.wait_for(pauses.asked.wait(), LIMIT_S)
            assert engine.phase is ReplicaPhase.FAILED
            assert f"Another engine answers at {foreign.address}" in engine.failure_reason


async def test_an_engine_whose_process_is_gone_is_started_again_though_its_connection_stays():
    """A child of its own may hold the connection."""
    wrapped = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-m', 'maitred.testing.scripted_engine', '--listen', sys.argv[1]]\n"
        "environment = {**os.environ, 'MAITRED_PARENT_PIPE': ''}\n"
        "subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)"
    )
    children = []
    try:
        async with LocalEngine(python(wrapped), sleep=Pauses()) as engine:
            await engine.wait_started()
            children += psutil.Process(engine.pid).children()
            os.kill(engine.pid, signal.SIGKILL)
            await restarted(engine, 1)
            children += psutil.Process(engine.pid).children()
            assert await answer(engine) == [5, 6, 7, 5]
    finally:
        for child in children:
            child.kill()


async def test_an_engine_that_breaks_the_protocol_is_replaced():
    async with LocalEngine(scripted({"fault": "garbage"}), sleep=Pauses()) as engine:
        await engine.wait_started()
        pid = engine.pid
        with pytest.raises(ReplicaLost):
            await answer(engine)
        await restarted(engine, 1)
        assert engine.pid != pid
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (lambda address: ["/nonexistent/engine", address], "cannot run its command.*No such file"),
        (python("print('no such model'); raise SystemExit(3)"), "(?s)exited with status 3.*no such model"),
        (python("import os; os.kill(os.getpid(), 9)"), "killed by SIGKILL.*printed nothing"),
    ],
)
async def test_a_first_start_that_fails_says_why(command, says):
    async with LocalEngine(command) as engine:
        with pytest.raises(ReplicaUnavailable, match=says):
            await engine.wait_started()
        with pytest.raises(ReplicaUnavailable):
            engine.client.card()


@pytest.mark.parametrize(
    "fault",
    [socket.gaierror(socket.EAI_AGAIN, "no name server"), ConnectionResetError("reset by peer"), ValueError("odd")],
    ids=lambda fault: type(fault).__name__,
)
@pytest.mark.parametrize("lives", [0, 1])
async def test_a_connection_that_breaks_off_once_is_made_again_with_a_new_process(monkeypatch, fault, lives):
    """A name server that is away for a moment must not leave the replica without a supervisor."""
    connect, reasons = EngineClient.connect, []

    async def break_off(client, timeout_s):
        connections.append(client)
        if len(connections) == lives + 1:
            raise fault
        await connect(client, timeout_s)

    connections = []
    monkeypatch.setattr(EngineClient, "connect", break_off)
    async with LocalEngine(scripted(), sleep=Pauses(), retries_first=lambda: True) as engine:
        engine.on_transition = lambda: reasons.append(engine.failure_reason)
        if lives:
            await engine.wait_started()
            os.kill(engine.pid, signal.SIGKILL)
        await restarted(engine, lives + 1)
        assert await answer(engine) == [5, 6, 7, 5]
    assert any(str(fault) in reason for reason in reasons)


async def test_an_engine_that_never_listens_is_given_up():
    async with LocalEngine(
        python("import time; print('loading', flush=True); time.sleep(60)"), start_timeout_s=1
    ) as engine:
        with pytest.raises(ReplicaUnavailable, match=r"(?s)within 1 s.*stopped by its supervisor.*loading"):
            await engine.wait_started()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 10, 1000])
def test_a_start_can_be_called_off(loop_factory, turns):
    async def call_off():
        async with LocalEngine(scripted(load_s=60)):
            for _ in range(turns):
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(call_off(), LIMIT_S))
    assert [command for _, command in living_children().values() if "scripted" in command] == []


async def test_an_engine_that_ignores_sigterm_is_killed():
    stubborn = python(
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from maitred.testing import scripted_engine as s\n"
        "import asyncio, maitred.wire.address as a\n"
        "async def main():\n"
        "    async with s.ScriptedEngine(address=a.parse_address(sys.argv[1])): await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    async with LocalEngine(stubborn, stop_grace_s=0.1) as engine:
        await engine.wait_started()
        pid = engine.pid
    assert not psutil.pid_exists(pid)


async def test_an_engine_that_hangs_is_killed_without_a_grace():
    """A stopped process reads no SIGTERM, so waiting for it would only keep callers waiting."""
    async with LocalEngine(scripted(), sleep=Pauses(), silence_timeout_s=2.0, stop_grace_s=100 * LIMIT_S) as engine:
        await engine.wait_started()
        pid = engine.pid
        os.kill(pid, signal.SIGSTOP)
        await restarted(engine, 1)
        assert not psutil.pid_exists(pid)
        assert await answer(engine) == [5, 6, 7, 5]


async def test_long_and_broken_lines_are_logged(caplog):
    chatty = python("import sys; sys.stdout.buffer.write(b'x' * 40000 + b'\\n\\xff end'); raise SystemExit(1)")
    with caplog.at_level("INFO", "maitred.engine"):
        async with LocalEngine(chatty) as engine:
            with pytest.raises(ReplicaUnavailable, match="\ufffd end"):
                await engine.wait_started()
    assert sum(record.getMessage().count("x") for record in caplog.records) == 40000


OWNER = """
import asyncio, json, sys
from maitred.fleet.local import LocalEngine

async def main():
    command = lambda address: [sys.executable, "-m", "maitred.testing.scripted_engine", "--listen", address]
    async with LocalEngine(command) as engine:
        await engine.wait_started()
        print(engine.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_engine_does_not_outlive_a_killed_parent(short_folder):
    environment = {**os.environ, "TMPDIR": str(short_folder)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment, cwd=Path.cwd()
    ) as owner:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    assert psutil.wait_procs([child], timeout=LIMIT_S)[1] == []
