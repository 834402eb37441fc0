"""What this very process holds, and that waiting for a core is seen."""

import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from maitred.observe.metrics.process import CpuWaitMetrics, process_resources

CROWDED = """
import os, time
from maitred.observe.metrics.process import CpuWaitMetrics

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
waits = CpuWaitMetrics()
others = os.fork()
if not others:
    while True:
        pass
try:
    ends_s = time.process_time() + 0.2
    while time.process_time() < ends_s:
        pass
finally:
    os.kill(others, 9)
    os.waitpid(others, 0)
print(*(sample.value for family in waits.collect() for sample in family.samples))
"""


def test_what_it_holds():
    before = process_resources()
    with ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(Path(os.devnull).open())
        ballast = stack.enter_context(mmap.mmap(-1, 32 << 20))  # anew: what was freed before may serve a bytearray
        ballast[::4096] = b"x" * (len(ballast) // 4096)
        after = process_resources()
    assert after["open_fds"] - before["open_fds"] == 30
    assert (24 << 20) < after["memory_bytes"] - before["memory_bytes"] < (64 << 20)
    assert after["threads"] >= 1


def test_a_thread_that_shares_its_core_is_seen_to_wait_for_it():
    if not list(CpuWaitMetrics().collect()):
        pytest.skip("this kernel keeps no statistics of its scheduler")
    done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, timeout=300, check=True)
    ran_s, loop_waited_s, waited_s = map(float, done.stdout.split())
    assert ran_s >= 0.2
    assert loop_waited_s > 0.05  # half of 0.4 s, if nobody else is there
    assert waited_s >= loop_waited_s
