"""The supervisor with processes of its own: which of them it starts again."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, signal, sys, time
from pathlib import Path
from maitred.app.workers import heartbeat, supervisor

heartbeat.SILENCE_LIMIT_S = 0.5
supervisor._CHECK_INTERVAL_S = 0.1
starts, supervisor_pid = Path(sys.argv[1]), os.getpid()

async def work():
    starts.write_text(starts.read_text() + "x")
    if len(starts.read_text()) == 1:
        await asyncio.sleep(0)  # its heart has begun to beat
        if sys.argv[2] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)
    os.kill(supervisor_pid, signal.SIGTERM)
    return 0

def main(workers, beats):
    return asyncio.run(beats.run(work()))

starts.write_text("")
sys.exit(supervisor.Supervisor({supervisor.CONTROLLER: main}, lambda: None).run())
"""


@pytest.mark.parametrize("how", ["stop", "block"])
def test_a_controller_that_hangs_is_replaced(tmp_path, how):
    """It was stopped, or its event loop is blocked; either way it does not exit."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "starts"), how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (tmp_path / "starts").read_text() == "xx", done.stderr
    assert "has hung" in done.stderr


REPLACED = """
import asyncio, os, signal, sys, time
from pathlib import Path
from maitred.app.workers import supervisor

starts, supervisor_pid = Path(sys.argv[1]), os.getpid()

async def wait():
    while True:
        await asyncio.sleep(3600)

async def succeed(pid):
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(1)  # in which another one would be started
    os.kill(supervisor_pid, signal.SIGTERM)
    await wait()

def control(workers, beats):
    os.kill(supervisor_pid, supervisor.READY)
    return asyncio.run(beats.run(wait()))

def work(workers, beats):
    starts.write_text(starts.read_text() + f"{os.getpid()} ")
    first, *others = map(int, starts.read_text().split())
    if not others:
        os.kill(supervisor_pid, supervisor.REPLACE_WORKERS)
    return asyncio.run(beats.run(succeed(first) if len(others) == 1 else wait()))

starts.write_text("")
mains = {supervisor.CONTROLLER: control, 1: work}
sys.exit(supervisor.Supervisor(mains, lambda: None).run())
"""


def test_a_worker_that_dies_while_its_successor_starts_has_no_other(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", REPLACED, str(tmp_path / "starts")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert len((tmp_path / "starts").read_text().split()) == 2, done.stderr
    assert "Its successor has been started" in done.stderr
