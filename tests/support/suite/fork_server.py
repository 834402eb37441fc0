"""Fork server: starts Python programs of tests as copies of a process that has imported what they need.

To import torch and maitred takes most of the start of an engine or a gateway, and the suite starts hundreds of them. So
each process of tests has a server, which imports once and is forked for each program. What it forks is a process of its
own, and all that a program can tell of itself is as if Python had been started: its parent, who waits for it,
its standard streams, folder, environment, command line, and how it ends. It runs `python -m` as Python does.

`subprocess` asks the server instead of the system where a program is one of `PROGRAMS`. A process that was forked has a
server in turn, for those that it starts: a gateway, for its engines. That one is forked first of all, before there are
threads, connections or an event loop. Variables that libraries read while they are imported are those of the server;
with others, and under `new_interpreters`, Python is started.

The child of a process must be forked by it, or be left to it by one of its children. So the server forks twice: the
first copy ends at once, and the system leaves its child to the next process above that takes in orphans
(`PR_SET_CHILD_SUBREAPER`), which is the one that asks, for as long as it asks.
"""

import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from tests.support.source import ROOT

PROGRAMS = frozenset(
    {
        "benchmarks.support.paced_engine",
        "maitred",
        "maitred.admission.grammars.worker",
        "maitred.cli.local_engine",
        "maitred.testing.scripted_engine",
        "maitred.testing.scripted_openai",
        "tests.support.concurrent_users",
        "tests.support.scripted_gateway",
        "tests.support.smallest_benchmark",
    }
)
"""Modules that the server runs."""
PRELOADED = (
    *("aiosqlite", "alembic.command", "maitred.app.assembly.build", "maitred.app.banner", "maitred.app.serve"),
    *(
        "maitred.app.start",
        "maitred.app.workers.supervisor",
        "maitred.cli.app",
        "maitred.cli.main",
        "maitred.cli.serve",
    ),
    *("maitred.engine.process", "rich.console", "sqlalchemy.ext.compiler"),
    *("uvicorn.lifespan.off", "uvicorn.protocols.http.httptools_impl", "uvicorn.supervisors", "uvloop"),
)
"""Modules that it imports, behind torch as an engine imports it."""
FREE = frozenset(
    {"COLUMNS", "HOME", "LINES", "NO_COLOR", "PATH", "PYTEST_CURRENT_TEST", "PYTHONPATH", "PYTHONUNBUFFERED", "TERM"}
)
"""Variables that nothing reads while it is imported; nor those that begin with ``MAITRED`` or ``XDG``."""
NAME = "fork server"
"""Name of a server's process; see `_children`."""

_COMMAND_BYTES = 16 * 1024
"""Room for a command line: the longest is that of an engine, with its settings as JSON."""
_MESSAGE_BYTES = 128 * 1024
_HIGH = 1000
"""Descriptors from here on are free."""
_SET_NAME, _SET_CHILD_SUBREAPER = 15, 36  # prctl(2)
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 48 - 3, 49 - 3  # of proc(5), without the process's id and name, counted from 0

_libc = ctypes.CDLL(None)
_prctl = _libc.prctl
_start_by_system = subprocess._fork_exec
_children_by_system = psutil.Process.children
_server: "ForkServer | None" = None
"""The one of this process."""


class StartRequest(msgspec.Struct, frozen=True):
    """What a process is to be; its descriptors are sent with it.

    Attributes:
        command: Words, from Python's on.
        folder: Where it works.
        environment: All of its variables.
        descriptors: What it knows each descriptor by.
        is_session: Whether it leads a session of its own.
        cores: On which it may run.
    """

    command: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: list[int]
    is_session: bool
    cores: set[int]


class ForkServer:
    """A fork server, as the process sees it that asks it.

    Args:
        connection: To the server.
        environment: The variables with which it imported.
    """

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._fixed = _fixed(environment)
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> "ForkServer":
        """Starts one that imports now."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), " " * _COMMAND_BYTES]
        with theirs, new_interpreters():
            started = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT)
            started.returncode = 0  # it ends when nobody can ask any more
        atexit.register(ours.close)
        return cls(ours, os.environ)

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with these variables would import what the server has imported."""
        return self._owner == os.getpid() and self._fixed == _fixed(environment)

    def fork(self, request: StartRequest, descriptors: Sequence[int]) -> int:
        """Starts a process and returns its id."""
        with self._lock:
            _prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [msgspec.msgpack.encode(request)], descriptors)
                return int(self._connection.recv(64))
            finally:
                _prctl(_SET_CHILD_SUBREAPER, 0)


def install() -> None:
    """Lets `subprocess` ask a fork server, which is started when it is first needed."""
    subprocess._fork_exec = _start
    psutil.Process.children = _children


@contextmanager
def new_interpreters() -> Iterator[None]:
    """Python is started for each program, as it is by users."""
    known, subprocess._fork_exec = subprocess._fork_exec, _start_by_system
    try:
        yield
    finally:
        subprocess._fork_exec = known


def _start(command, executables, close_fds, kept, folder, environment, *rest):
    """Stands for `_fork_exec`, which `subprocess.Popen` calls to start a process; returns its id."""
    global _server
    stdin, _, _, stdout, _, stderr, _, error_pipe, _, is_session, group, gid, gids, uid, umask, before = rest[:16]
    words = [os.fsdecode(word) for word in command]
    variables = (
        dict(os.environ)
        if environment is None
        else dict(os.fsdecode(variable).split("=", 1) for variable in environment)
    )
    ours = words[:2] == [sys.executable, "-m"] and words[2] in PROGRAMS and close_fds
    if ours and (group, gid, gids, uid, umask, before) == (-1, None, None, None, -1, None):
        if _server is None:
            _server = ForkServer.start()
        if _server.suits(variables):
            passed = [descriptor for descriptor in kept if descriptor != error_pipe]
            streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
            request = StartRequest(
                words,
                os.fsdecode(folder or Path.cwd()),
                variables,
                [0, 1, 2, *passed],
                bool(is_session),
                os.sched_getaffinity(0),
            )
            return _server.fork(request, [*streams, *passed])
    return _start_by_system(command, executables, close_fds, kept, folder, environment, *rest)


def _children(process, recursive=False):
    """Stands for `psutil.Process.children`: those of a process, without its fork server."""
    return [child for child in _children_by_system(process, recursive) if _name(child) != NAME]


def _name(process):
    try:
        return process.name()
    except psutil.Error:
        return ""


def _fixed(environment):
    return {
        name: value
        for name, value in environment.items()
        if name not in FREE and not name.startswith(("MAITRED", "XDG"))
    }


# What follows runs in the server's process, and in those that it forks.


def serve(connection: socket.socket) -> tuple[StartRequest, list[int]]:
    """Answers requests until nobody can ask any more; returns in each process that it forks, with its request."""
    _prctl(_SET_NAME, NAME.encode())
    # Ctrl-C in a terminal reaches all processes of its group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 64)
        if not message:
            os._exit(0)
        told, tells = os.pipe()
        if (first := os.fork()) == 0:
            first = os.getpid()
            if second := os.fork():
                os.write(tells, str(second).encode())
                os._exit(0)
            while os.getppid() == first:
                time.sleep(0.0005)
            return msgspec.msgpack.decode(message, type=StartRequest), descriptors
        os.waitpid(first, 0)
        connection.send(os.read(told, 64))
        for descriptor in (told, tells, *descriptors):
            os.close(descriptor)


def run(request: StartRequest, descriptors: Sequence[int]) -> None:
    """Runs a program as all there is in this process, which was forked for it."""
    global _server
    _use_descriptors(request.descriptors, descriptors)
    if request.is_session:
        os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    os.sched_setaffinity(0, request.cores)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for number in request.descriptors:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        run(*serve(theirs))
        return
    theirs.close()
    _server = ForkServer(ours, os.environ)
    install()
    asyncio.create_subprocess_exec = asyncio.subprocess.create_subprocess_exec = _create_subprocess_exec

    _, _, module, *arguments = request.command
    _prctl(_SET_NAME, Path(sys.executable).name.encode())
    _show_command(request.command)
    _open_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv[:] = request.command
    sys.argv[:] = ["-m", *arguments]
    sys.path[:1] = [request.folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if module != "maitred":  # a package, whose `__main__` runs
        sys.modules.pop(module, None)
    atexit.register(_leave, sys.modules.keys() - sys.stdlib_module_names - {__name__})
    gc.enable()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _use_descriptors(numbers, descriptors):
    """Gives descriptors the numbers that a program knows them by, and closes all others."""
    held = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in descriptors]
    os.closerange(3, _HIGH)
    for descriptor, number in zip(held, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _leave(names):
    """Leaves imported modules to the system when the program ends: to take them apart takes longer than its start."""
    for name in names:
        module = sys.modules.pop(name, None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    _libc.on_exit(_libc._exit, None)


def _show_command(command):
    """Writes a command line where the system reads it, as `ps` shows it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    shown = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _open_streams():
    """Opens the standard streams as Python does when it starts."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding="utf-8",
            errors=errors,
            newline="\n",
            line_buffering=number == 2 or raw.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _SubprocessTransport(BaseSubprocessTransport):
    """Subprocess of an event loop that starts processes without `subprocess`, as uvloop does."""

    def _start(self, args, shell, stdin, stdout, stderr, bufsize, **options):
        self._proc = subprocess.Popen(
            args, shell=shell, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=bufsize, **options
        )
        ending = os.pidfd_open(self._proc.pid)
        self._loop.add_reader(ending, self._end, ending)

    def _end(self, ending):
        self._loop.remove_reader(ending)
        os.close(ending)
        self._process_exited(self._proc.wait())


async def _create_subprocess_exec(*command, stdin=None, stdout=None, stderr=None, limit=2**16, **options):
    """Stands for `asyncio.create_subprocess_exec`."""
    loop = asyncio.get_running_loop()
    protocol = asyncio.subprocess.SubprocessStreamProtocol(limit, loop)
    connected = loop.create_future()
    transport = _SubprocessTransport(
        loop, protocol, command, False, stdin, stdout, stderr, 0, waiter=connected, **options
    )
    await connected
    return asyncio.subprocess.Process(transport, protocol, loop)


def main() -> None:
    """Imports, and serves on the connection whose descriptor is named."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    from maitred.engine.lean_torch import import_lean_torch, wait_briefly_at_barriers

    wait_briefly_at_barriers()
    import_lean_torch()
    for module in PRELOADED:
        importlib.import_module(module)
    _load_kernels()
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    gc.freeze()
    run(*serve(connection))


def _load_kernels():
    """Lets a small engine load, or compile, the kernels of all; on one thread, for a fork has no other."""
    from maitred.config.tree import BUNDLED_MODEL
    from maitred.core.flow import ServiceWeights
    from maitred.engine.assembly import build
    from maitred.engine.config import EngineConfig

    build(BUNDLED_MODEL, EngineConfig(threads=1, kv_memory_bytes=64 << 20), ServiceWeights())


if __name__ == "__main__":
    # Under its own name, so that programs that import it see this server.
    importlib.import_module("tests.support.suite.fork_server").main()
