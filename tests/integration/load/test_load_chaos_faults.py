"""Faults on real processes: what they do, and that they are undone."""

import asyncio
import errno
import os
import resource
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from maitred.core.errors import Unavailable
from maitred.load.chaos import clock as clock_module
from maitred.load.chaos.clock import FakeClock, find_library
from maitred.load.chaos.faults import inflict
from maitred.load.chaos.installation import RunningInstallation
from maitred.load.chaos.plan import ChaosFault, Installation, ProcessRole

OBEDIENT = """
import mmap, sys
for line in sys.stdin:
    word, _, argument = line.strip().partition(" ")
    try:
        if word == "write":
            with open(argument, "a", buffering=1) as file:
                file.write("x")
        elif word == "map":
            mmap.mmap(-1, int(argument)).close()
        print("done", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


class Obedient:
    """A process that runs commands, and says whether it could."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", OBEDIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seen = psutil.Process(self.process.pid)
        self.does("nothing")

    def does(self, order):
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def obedient():
    child = Obedient()
    try:
        yield child
    finally:
        child.process.kill()
        child.process.stdin.close()
        child.process.stdout.close()
        child.process.wait()


def installed(child, **fields):
    return RunningInstallation(Installation(pid=child.process.pid, url="http://127.0.0.1:1", **fields))


async def no_burst(_):
    raise AssertionError("no burst was planned")


def block(child, kind, target="gateway", **fields):
    notes = []
    return inflict(ChaosFault(kind=kind, target=target, at_s=0, **fields), installed(child), no_burst, notes.append)


def state(child):
    deadline_s = time.monotonic() + 300
    while (status := child.seen.status()) == psutil.STATUS_RUNNING and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return status


async def test_hang_stops_and_goes_on():
    with obedient() as child:
        async with block(child, "hang", for_s=1):
            assert state(child) == psutil.STATUS_STOPPED
        assert child.does("nothing") == "done"


@pytest.mark.parametrize(("kind", "fields"), [("hang", {}), ("slow", {"speed": 0.1})])
async def test_a_block_that_is_cancelled_lets_it_go_on(kind, fields):
    with obedient() as child:
        entered = asyncio.Event()

        async def forever():
            async with block(child, kind, for_s=1, **fields):
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(forever())
        await entered.wait()
        task.cancel()
        await asyncio.wait({task})
        assert state(child) == psutil.STATUS_SLEEPING
        assert child.does("nothing") == "done"


@contextmanager
def burning():
    """A process that takes all the time that it gets."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_slow_leaves_a_share_of_the_speed():
    with burning() as process:
        installation = RunningInstallation(Installation(pid=process.pid, url="http://127.0.0.1:1"))
        seen, notes = psutil.Process(process.pid), []
        fault = ChaosFault(kind="slow", target="gateway", at_s=0, for_s=1, speed=0.25)
        before, began_s = seen.cpu_times().user, time.monotonic()
        async with inflict(fault, installation, no_burst, notes.append):
            await asyncio.sleep(2)
        share = (seen.cpu_times().user - before) / (time.monotonic() - began_s)
        assert 0 < share < 0.5
        assert any("of the time" in note for note in notes)


async def test_a_full_disk_fails_writes_and_is_undone(tmp_path):
    with obedient() as child:
        write = f"write {tmp_path / 'file'}"
        before = child.seen.rlimit(resource.RLIMIT_FSIZE)
        assert child.does(write) == "done"
        async with block(child, "disk_full", for_s=1):
            assert child.does(write) == str(errno.EFBIG)
        assert child.does(write) == "done"
        assert child.seen.rlimit(resource.RLIMIT_FSIZE) == before


async def test_memory_is_short_and_is_given_back():
    with obedient() as child:
        before = child.seen.rlimit(resource.RLIMIT_AS)
        async with block(child, "memory", for_s=1, spare_bytes=8 << 20):
            assert child.does(f"map {4 << 20}") == "done"
            assert child.does(f"map {64 << 20}") == str(errno.ENOMEM)
        assert child.does(f"map {64 << 20}") == "done"
        assert child.seen.rlimit(resource.RLIMIT_AS) == before


async def test_kill_kills():
    with obedient() as child:
        async with block(child, "kill"):
            assert child.process.wait(300) == -9
        with pytest.raises(Unavailable, match=r"'gateway' now|has ended"):
            async with block(child, "hang", for_s=1):
                pass


async def test_a_process_that_dies_while_it_hangs_is_no_trouble():
    with obedient() as child:
        async with block(child, "hang", for_s=1):
            child.process.kill()
            child.process.wait()


PARENT = """
import subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(60)"]
children = [subprocess.Popen([*command, name], stdin=subprocess.PIPE) for name in sys.argv[1:]]
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def family(*names):
    with subprocess.Popen([sys.executable, "-c", PARENT, *names], stdout=subprocess.PIPE, text=True) as parent:
        try:
            parent.stdout.readline()
            children = psutil.Process(parent.pid).children()
            yield parent, children
        finally:
            for child in children:
                child.kill()
            parent.kill()


def wait_until_dead(process):
    deadline_s = time.monotonic() + 300
    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline_s:
        time.sleep(0.01)


def test_a_role_is_found_below_the_gateway(tmp_path):
    file = tmp_path / "own.pid"
    file.write_text(f"{os.getpid()}\n")
    roles = {
        "replica-2": ProcessRole(child_of="gateway", command_contains="replica-2"),
        "any": ProcessRole(child_of="gateway"),
        "tests": ProcessRole(pid_file=str(file)),
        "lost": ProcessRole(pid_file=str(tmp_path / "none")),
    }
    with family("engine", "replica-2") as (parent, children):
        installation = RunningInstallation(Installation(pid=parent.pid, url="http://127.0.0.1:1", processes=roles))
        find = installation.processes.find
        assert find("gateway").pid == parent.pid
        assert find("engine").cmdline()[-1] == "engine"
        assert find("replica-2").cmdline()[-1] == "replica-2"
        assert find("tests").pid == os.getpid()
        with pytest.raises(Unavailable, match="Several processes below 'gateway' could be 'any'"):
            find("any")
        with pytest.raises(Unavailable, match="holds no id"):
            find("lost")
        for child in children:
            child.kill()
            wait_until_dead(child)
        with pytest.raises(Unavailable, match="'engine' in its command line now"):
            find("engine")


def test_without_its_library_a_clock_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(clock_module, "_FOLDERS", (str(tmp_path),))
    with pytest.raises(Unavailable, match="apt install faketime"):
        find_library()


def test_the_clock_of_a_process_jumps_and_its_monotonic_clock_does_not(tmp_path):
    try:
        library = find_library()
    except Unavailable:
        pytest.skip("libfaketime is not installed here")
    clock = FakeClock(tmp_path / "clock", library)
    code = "import time\nfor _ in range(2): input(); print(time.time(), time.monotonic(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **clock.environment()},
    ) as process:

        def times():
            process.stdin.write("\n")
            process.stdin.flush()
            return map(float, process.stdout.readline().split())

        wall_s, monotonic_s = times()
        assert abs(wall_s - time.time()) < 60
        clock.set(3600)
        later_s, later_monotonic_s = times()
        assert 3590 < later_s - wall_s < 3660
        assert later_monotonic_s - monotonic_s < 60
