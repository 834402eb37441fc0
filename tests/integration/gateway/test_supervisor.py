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
