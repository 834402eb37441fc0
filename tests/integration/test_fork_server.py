"""Fork server of the suite: a forked program is as if Python had been started for it."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from tests.support.source import ROOT
from tests.support.suite import fork_server

COMMAND = [sys.executable, "-m", "tests.support.suite.self_description"]
WORDS = ["--set=a.b=c d", "", "ü", "x" * 50_000]
STARTED = "assert 'uvloop' not in sys.modules"
STARTS_ANOTHER = f"""
import asyncio, uvloop
from asyncio.subprocess import PIPE
async def start():
    another = await asyncio.create_subprocess_exec(*{COMMAND!r}, stdin=PIPE, stdout=PIPE)
    output, _ = await another.communicate(b"print('forked' if 'uvloop' in sys.modules else 'started'); sys.exit(7)")
    description = json.loads(output.splitlines()[0])
    print("child of mine" if description["parent"] == os.getpid() else "a stranger")
    print(output.splitlines()[1].decode(), another.returncode, "children:", psutil.Process().children(), sep="\\n")
uvloop.run(start())
"""


def run(program, *words, **options):
    return subprocess.run([*COMMAND, *words], input=program, capture_output=True, text=True, check=False, **options)


def forked_and_started(program, *words, **options):
    """The same program as a fork, and as Python starts it."""
    forked = run(f"assert 'uvloop' in sys.modules\n{program}", *words, **options)
    with fork_server.new_interpreters():
        return forked, run(program, *words, **options)


@pytest.fixture(autouse=True)
def asked(pytestconfig):
    """A server is asked, where there is one."""
    if pytestconfig.option.new_interpreters or not fork_server.available():
        pytest.skip("No programs are forked here.")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("session", [False, True])
def test_it_is_told_the_same(tmp_path, session, unbuffered):
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": unbuffered,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "ODD": "ü = \n",
    }
    cores, files = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    read, write = os.pipe()
    try:
        os.sched_setaffinity(0, {min(cores)})
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
        options = {"cwd": tmp_path, "env": environment, "start_new_session": session, "pass_fds": [write]}
        forked, started = forked_and_started("", *WORDS, **options)
    finally:
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        os.close(read)
        os.close(write)
    description = json.loads(forked.stdout)
    assert description == json.loads(started.stdout)
    assert description["command"] == [*COMMAND, *WORDS]
    assert description["parent"] == os.getpid()
    assert description["limits"][0] == [files[0] - 1, files[1]]


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('a reason')", 1),
        ("raise ValueError('a reason')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("print('last', end='')", 0),
        ("import atexit; atexit.register(print, 'after all')", 0),
        ("import threading; threading.Timer(0.1, print, ['later']).start()", 0),
        ("sys.stdout.write('lost'); os.close(1)", 120),
        ("sys.stdout.close()", 0),
    ],
)
def test_it_ends_the_same(program, code):
    forked, started = forked_and_started(program, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert forked.returncode == started.returncode == code
    assert forked.stdout.splitlines()[1:] == started.stdout.splitlines()[1:]
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_it_has_a_server_in_turn():
    ended = run(STARTS_ANOTHER)
    assert ended.stdout.splitlines()[1:] == ["child of mine", "forked", "7", "children:", "[]"], ended.stderr


def test_it_leaves_nothing_when_it_is_killed():
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        servers = [each for each in psutil.process_iter(["ppid"]) if each.info["ppid"] == process.pid]
        process.kill()
        assert process.stdout.read() == b""
    assert process.returncode == -signal.SIGKILL
    assert len(servers) == 1
    assert not psutil.wait_procs(servers, timeout=300)[1]


def test_what_torch_sets_in_a_process_of_tests_changes_nothing():
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/tmp/other"}
    assert run("assert 'uvloop' in sys.modules", env=environment).returncode == 0


def test_python_is_started_with_variables_that_it_reads_when_it_starts():
    assert run(STARTED, env={**os.environ, "PYTHONDEVMODE": "1"}).returncode == 0


def test_python_is_started_where_the_server_has_ended(monkeypatch):
    connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.close()
    with connection:
        monkeypatch.setattr(fork_server, "_server", fork_server.ForkServer(connection))
        assert run(STARTED).returncode == 0


def test_nothing_is_installed_in_a_python_that_starts_processes_otherwise(monkeypatch):
    monkeypatch.setattr(fork_server, "_execute_by_system", lambda self, args, executable: None)
    assert not fork_server.available()
