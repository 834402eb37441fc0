"""PostgreSQL server for tests and benchmarks, in a temporary folder and on a free port.

The programs come from the package ``postgresql``, which `scripts/services.sh` installs. PostgreSQL refuses to run as
root, so a process of root runs it as the user ``postgres`` or ``nobody``.
"""

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from maitred.testing.server_process import ProgramMissing

_OWNER = "maitred"


def programs() -> Path | None:
    """Returns the folder of the newest installed version."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if (elsewhere := shutil.which("initdb")) is not None:
        found.append(Path(elsewhere).resolve().parent)
    versions = sorted(found, key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0)
    return versions[-1] if versions else None


class PostgresServer:
    """PostgreSQL server; `kill`, `start` and `paused` show how clients react to its absence."""

    def __init__(self, bin_folder: Path) -> None:
        self._bin = bin_folder
        self._folder = Path(tempfile.mkdtemp(prefix="maitred-pg-"))
        self._data = self._folder / "data"
        self._user = _unprivileged_user()
        if self._user is not None:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._names = (f"test_{number}" for number in itertools.count())

    def create(self) -> None:
        """Creates the files of the server."""
        options = ["--auth=trust", f"--username={_OWNER}", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        self._run("initdb", "-D", str(self._data), *options)

    def start(self) -> None:
        """Starts the server, and waits until it accepts connections."""
        assert self._process is None, "It runs already."
        # The data may be lost in a power cut, so the server does not wait for the disk.
        settings = ["-c", "fsync=off", "-c", "max_connections=60"]
        place = ["-D", str(self._data), "-k", str(self._folder), "-h", "127.0.0.1", "-p", str(self.port)]
        # The server ends with its owner in every case: util-linux's setpriv requests this from the kernel.
        with_us = ["setpriv", "--pdeathsig", "QUIT"] if shutil.which("setpriv") else []
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*with_us, str(self._bin / "postgres"), *place, *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                **self._as_user(),
            )
        deadline = time.monotonic() + 60
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_tail = (self._folder / "log").read_text(errors="replace")[-3000:]
                self.kill()
                raise RuntimeError(f"PostgreSQL did not start:\n{log_tail}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills the server at once, as a crash would."""
        if self._process is None:
            return
        for process in self._all():
            _signal(process, signal.SIGKILL)
        self._process.wait()
        self._process = None
        # Another process may have its process id by now, which would look like a running server.
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the server's processes during the context: it keeps its connections, but does nothing."""
        processes = self._all()
        for process in processes:
            _signal(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in reversed(processes):
                _signal(process, signal.SIGCONT)

    def database(self) -> str:
        """Creates an empty database, and returns its URL."""
        name = next(self._names)
        self.sql(f"CREATE DATABASE {name}")
        return f"postgresql://{_OWNER}@127.0.0.1:{self.port}/{name}"

    @property
    def socket(self) -> Path:
        """Unix socket at which the server listens besides its port."""
        return self._folder / f".s.PGSQL.{self.port}"

    def sql(self, statement: str, database: str = "postgres") -> str:
        """Returns what `psql` prints for a statement."""
        place = ["-h", str(self._folder), "-p", str(self.port), "-U", _OWNER, "-d", database]
        return self._run("psql", "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", *place, "-c", statement)

    def remove(self) -> None:
        """Stops the server and removes its files."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ready(self) -> bool:
        command = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0

    def _all(self) -> list[psutil.Process]:
        """Returns all processes, the server first, so that it starts no new one while others are signalled."""
        if self._process is None:
            return []
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self._bin / program), *arguments]
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, capture_output=True, text=True, cwd=self._folder, check=False, **self._as_user()
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Runs a server; a caller that kills it may start it again.

    Raises:
        ProgramMissing: PostgreSQL is not installed.
    """
    found = programs()
    if found is None:
        raise ProgramMissing("PostgreSQL is not installed; scripts/services.sh installs what is needed.")
    server = PostgresServer(found)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.remove()


def _unprivileged_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody.")


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
