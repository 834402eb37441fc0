"""Fork server: starts Python programs of tests as copies of a process that has imported what they need.

To import torch and maitred takes most of the start of an engine or a gateway, and the suite starts hundreds of them. So
each process of tests has a server, which imports once and is forked for each program. What it forks is a process of its
own, and what a program can tell of itself is as if Python had been started: its parent, who waits for it, its
standard streams, folder, environment, command line, and how it ends. Only its memory is shared with the server.

`subprocess` asks the server instead of the system where a program is one of `PROGRAMS`. A process that was forked has a
server in turn, for those that it starts: a gateway, for its engines. That one is forked first of all, before there are
threads, connections or an event loop. With other variables that libraries read while they are imported, under
`new_interpreters`, and wherever a server cannot be had, Python is started.

A child has to be forked by its parent, or left to it by one of its children. So the server forks twice: the first copy
ends at once, and the system leaves its child to the next process above that takes in orphans
(`PR_SET_CHILD_SUBREAPER`), which is the one that asks, for as long as it asks.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import os
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import uvloop

from tests.support.source import ROOT
from tests.support.suite.compiled_kernels import build_small_engine

STARTERS = frozenset(
    {
        "maitred",
        "tests.support.scripted_gateway",
        "tests.support.smallest_benchmark",
        "tests.support.suite.self_description",
    }
)
"""Modules that the server runs, and that start others."""
PROGRAMS = STARTERS | {
    "benchmarks.support.chaos.attacker_process",
    "benchmarks.support.gateways.bare_gateway",
    "benchmarks.support.gateways.pass_through",
    "benchmarks.support.paced_engine",
    "benchmarks.support.scripted_load",
    "maitred.admission.grammars.worker",
    "maitred.cli.local_engine",
    "maitred.testing.scripted_engine",
    "maitred.testing.scripted_openai",
    "tests.support.concurrent_users",
    "tests.support.suite.given_code",
}
"""All that it runs."""
PRELOADED = (
    *("aiosqlite", "encodings.idna", "maitred.app.assembly.build", "maitred.app.banner", "maitred.app.serve"),
    *("maitred.app.start", "maitred.app.workers.supervisor", "maitred.cli.app", "maitred.cli.main"),
    *("maitred.cli.serve", "maitred.engine.process", "maitred.replica.upstream.probe", "rich.console"),
    *("uvicorn.lifespan.off", "uvicorn.protocols.http.httptools_impl", "uvicorn.supervisors", "uvloop"),
)
"""Modules that it imports, behind torch as an engine imports it."""
READ_EARLY = (
    *("CUDA", "GOMP", "HF", "KMP", "LANG", "LC_", "LD_", "MALLOC", "MKL", "NUMBA", "OMP", "OPENBLAS", "PYTHON"),
    *("PYTORCH", "SSL", "TORCH_", "TRANSFORMERS", "TRITON", "TZ"),
)
"""Beginnings of variables that Python and libraries read when they start or are imported. ``TORCHINDUCTOR_CACHE_DIR``
is none: torch sets it in a process of tests that compiles."""
READ_LATE = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED"})
"""Those of them that a forked program heeds."""
NAME = "fork server"
"""Name of a server's process; see `_children`."""

_MESSAGE_BYTES = 128 * 1024
_HIGH = 1000
"""Descriptors from here on are free."""
_SET_MEMORY, _MAP, _MAP_SIZE, _SET_CHILD_SUBREAPER = 35, 14, 15, 36  # of prctl(2)
_KNOWN = (
    "self args executable preexec_fn close_fds pass_fds cwd env startupinfo creationflags shell p2cread p2cwrite "
    "c2pread c2pwrite errread errwrite restore_signals gid gids uid umask start_new_session process_group"
)
"""Parameters of the function that `_execute_child` stands for."""

_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p
_shown: "ctypes.Array[ctypes.c_char] | None" = None
"""Command line and variables of this process, where the system reads them."""
_execute_by_system = subprocess.Popen._execute_child
_execute_by_uvloop = uvloop.Loop.subprocess_exec
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
        limits: Of what it may use of the system, soft and hard.
    """

    command: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: list[int]
    is_session: bool
    cores: set[int]
    limits: dict[int, tuple[int, int]]


class ForkServer:
    """A fork server, as the process sees it that asks it.

    Args:
        connection: To the server.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._fixed = _fixed(os.environ)
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> "ForkServer":
        """Starts one that imports now."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        with theirs:
            started = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT)
        started.returncode = 0  # it ends when nobody can ask any more
        atexit.register(ours.close)
        return cls(ours)

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with these variables would import what the server has imported."""
        return self._owner == os.getpid() and self._fixed == _fixed(environment)

    def fork(self, request: StartRequest, descriptors: Sequence[int]) -> int:
        """Starts a process and returns its id.

        Raises:
            OSError: The server has ended, or the request is too long for it.
        """
        message = msgspec.msgpack.encode(request)
        if len(message) > _MESSAGE_BYTES:
            raise OSError(f"{len(message)} bytes")
        with self._lock:
            _prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [message], descriptors)
                if not (answer := self._connection.recv(64)):
                    raise OSError("The fork server has ended.")
                return int(answer)
            finally:
                _prctl(_SET_CHILD_SUBREAPER, 0)


def available() -> bool:
    """Whether this Python starts processes as this module knows it, and the system lets them change what `ps` shows."""
    known = " ".join(inspect.signature(_execute_by_system).parameters) == _KNOWN
    return sys.platform == "linux" and known and not _prctl(_SET_MEMORY, _MAP_SIZE, ctypes.byref(ctypes.c_uint()))


def install() -> None:
    """Lets `subprocess` ask a fork server, which is started when it is first needed."""
    if available():
        subprocess.Popen._execute_child = _execute_child
        uvloop.Loop.subprocess_exec = _subprocess_exec
        psutil.Process.children = _children


@contextmanager
def new_interpreters() -> Iterator[None]:
    """Python is started for each program, as it is by users."""
    known, subprocess.Popen._execute_child = subprocess.Popen._execute_child, _execute_by_system
    try:
        yield
    finally:
        subprocess.Popen._execute_child = known


def _execute_child(popen, *arguments):
    """Stands for `subprocess.Popen._execute_child`, which starts the process of one."""
    asked = dict(zip(_KNOWN.split()[1:], arguments, strict=True))
    pid = _forked(**asked)
    if pid is None:
        _execute_by_system(popen, *arguments)
    else:
        popen.pid, popen._child_created = pid, True
        popen._close_pipe_fds(*(asked[name] for name in asked if name.endswith(("read", "write"))))


def _forked(args, close_fds, pass_fds, cwd, env, p2cread, c2pwrite, errwrite, start_new_session, **others):
    """The id of the forked process; None: Python has to be started."""
    global _server
    plain = {"executable": None, "preexec_fn": None, "shell": False, "process_group": -1}
    plain |= {"gid": None, "gids": None, "uid": None, "umask": -1}
    words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fsdecode(word) for word in args]
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()}
    folder = Path(os.fsdecode(cwd or Path.cwd()))
    if not (_is_known(words) and close_fds and folder.is_dir() and plain.items() <= others.items()):
        return None
    if _server is None:
        with new_interpreters():
            _server = ForkServer.start()
    if not _server.suits(variables):
        return None
    streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
    request = StartRequest(
        command=words,
        folder=str(folder),
        environment=variables,
        descriptors=[0, 1, 2, *pass_fds],
        is_session=start_new_session,
        cores=os.sched_getaffinity(0),
        limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
    )
    with suppress(OSError):
        return _server.fork(request, [*streams, *pass_fds])


def _is_known(command):
    return command[:2] == [sys.executable, "-m"] and command[2] in PROGRAMS


def _children(process, recursive=False):
    """Stands for `psutil.Process.children`: those of a process, without its fork server."""
    return [child for child in _children_by_system(process, recursive) if _name(child) != NAME]


def _name(process):
    try:
        return process.name()
    except psutil.Error:
        return ""


def _fixed(environment):
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY) and name not in READ_LATE}


def _prctl(option, second, third=None, fourth=0):
    return _libc.prctl(option, ctypes.c_ulong(second), third, ctypes.c_ulong(fourth), ctypes.c_ulong(0))


class _SubprocessTransport(BaseSubprocessTransport):
    """Subprocess of a loop of uvloop, which starts its own without `subprocess`."""

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


async def _subprocess_exec(loop, protocol_factory, *command, stdin=None, stdout=None, stderr=None, **options):
    """Stands for `uvloop.Loop.subprocess_exec`."""
    if subprocess.Popen._execute_child is _execute_by_system or not _is_known([*command]):
        return await _execute_by_uvloop(
            loop, protocol_factory, *command, stdin=stdin, stdout=stdout, stderr=stderr, **options
        )
    protocol, connected = protocol_factory(), loop.create_future()
    transport = _SubprocessTransport(
        loop, protocol, command, False, stdin, stdout, stderr, 0, waiter=connected, **options
    )
    await connected
    return transport, protocol


# What follows runs in the server's process, and in those that it forks.


def main() -> None:
    """Imports, and serves on the connection whose descriptor is named."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _show(sys.orig_argv, os.environ)  # where that is not allowed, this server ends, and Python is started
    gc.disable()
    from maitred.engine.lean_torch import import_lean_torch, wait_briefly_at_barriers

    wait_briefly_at_barriers()
    import_lean_torch()
    for module in PRELOADED:
        importlib.import_module(module)
    build_small_engine(threads=1)  # a fork has no other thread
    gc.freeze()
    run(*serve(connection))


def serve(connection: socket.socket) -> tuple[StartRequest, list[int]]:
    """Answers requests until nobody can ask any more; returns in each process that it forks, with its request."""
    _set_name(NAME)
    # Ctrl-C in a terminal reaches all processes of its group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 64)
        if not message:
            os._exit(0)
        if (first := os.fork()) == 0:
            first = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == first:
                time.sleep(0.0005)
            connection.send(str(os.getpid()).encode())
            return msgspec.msgpack.decode(message, type=StartRequest), descriptors
        os.waitpid(first, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def run(request: StartRequest, descriptors: Sequence[int]) -> None:
    """Runs a program as all there is in this process, which was forked for it."""
    _use_descriptors(request.descriptors, descriptors)
    if request.is_session:
        os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    os.sched_setaffinity(0, request.cores)
    for limit, most in request.limits.items():
        resource.setrlimit(limit, most)

    _, _, module, *arguments = request.command
    if module in STARTERS:
        _install_another(request.descriptors)
    _set_name(Path(sys.executable).name)
    _show(request.command, request.environment)
    _open_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv[:] = request.command
    sys.argv[:] = ["-m", *arguments]
    sys.path[:1] = [request.folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if module != "maitred":  # a package, whose `__main__` runs
        sys.modules.pop(module, None)
    gc.enable()
    _run_to_end(module)


def _install_another(inherited):
    """Forks a server for what this process starts, which lets go of the descriptors that the process has."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for number in inherited:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        run(*serve(theirs))
    theirs.close()
    _server = ForkServer(ours)
    install()


def _run_to_end(module):
    """Runs `python -m`, and ends the process as Python does, but for its memory, which the system takes back sooner."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = 0 if ending.code is None else ending.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError as error:
            sys.excepthook(type(error), error, error.__traceback__)
            code = 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _use_descriptors(numbers, descriptors):
    """Gives descriptors the numbers that a program knows them by, and closes all others."""
    held = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in descriptors]
    os.closerange(3, _HIGH)
    for descriptor, number in zip(held, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _set_name(name):
    Path("/proc/self/comm").write_text(name)


def _show(command, environment):
    """Tells the system where this process has its command line and variables, which `ps` and psutil read.

    A kernel with CONFIG_CHECKPOINT_RESTORE lets every process do so.
    """
    global _shown
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    shown = ctypes.create_string_buffer(words + variables)
    begin = ctypes.addressof(shown)
    ends = (begin, begin + len(words), begin + len(words), begin + len(words + variables))
    code_begin, code_end, stack = _own_fields(26, 27, 28)
    # The fields of `struct prctl_mm_map`; the last three leave the auxiliary vector and the executable as they are.
    fields = (code_begin, code_end, *_own_fields(45, 46, 47), _libc.sbrk(0), stack, *ends, 0, 0, -1)
    memory = struct.pack("12QIi", *fields)
    if _prctl(_SET_MEMORY, _MAP, memory, len(memory)):
        raise OSError("The command line of this process cannot be changed.")
    _shown = shown


def _own_fields(*numbers):
    """Fields of this process in ``/proc/PID/stat``, counted from 1 as proc(5) does."""
    behind_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return [int(behind_name[number - 3]) for number in numbers]


def _open_streams():
    """Opens the standard streams as Python does when it starts."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        known = getattr(sys, f"__{name}__")
        raw = io.FileIO(number, "r" if name == "stdin" else "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedReader(raw) if name == "stdin" else raw if unbuffered else io.BufferedWriter(raw),
            encoding=known.encoding,
            errors=known.errors,
            line_buffering=not unbuffered and (raw.isatty() or name == "stderr"),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    # Under its own name, so that programs that import it see this server.
    importlib.import_module("tests.support.suite.fork_server").main()
