"""Process of the scripted server: starts it, reads its record, and stops it."""

import argparse
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from maitred.core.parent_watch import LIFELINE_VARIABLE, follow_parent
from maitred.testing.scripted_openai.script import ServerScript
from maitred.testing.scripted_openai.server import ScriptedServer
from maitred.testing.scripted_openai.truth import ServedRecord

STOP_S = 300.0
READY = "ready "


class ScriptedOpenAI:
    """A running scripted server.

    Attributes:
        url: Address that it listens at, without a trailing slash.
        script: What it does.
        unix_socket: Path of its Unix socket, if it listens on one.
        process: Its process.
    """

    def __init__(self, url: str, script: ServerScript, process: "subprocess.Popen[str]", log: Path) -> None:
        self.script = script
        self.unix_socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self.url = url if self.unix_socket is None else "http://localhost"
        self.process = process
        self._log = log

    def truth(self) -> ServedRecord:
        """Returns the server's record so far. The server pauses meanwhile, so call it without open requests."""
        if self.process.poll() is not None:
            return ServedRecord.load(self._log)
        with urllib.request.urlopen(f"{self.url}/log", timeout=300) as response:
            return ServedRecord.load(response.read())

    def stop(self) -> ServedRecord:
        """Stops the server with SIGTERM, if it still runs, and returns its record."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        if code != 0:
            raise RuntimeError(f"The scripted server ended with code {code}.")
        return ServedRecord.load(self._log)


@contextmanager
def scripted_openai(
    script: ServerScript | None = None, *, core: int | None = None, unix: bool = False, port: int = 0
) -> Iterator[ScriptedOpenAI]:
    """Starts a scripted server on a loopback port, and stops it at the end.

    Args:
        script: Script of the server; the default is 16 tokens, the first after 50 ms and the others every 20 ms.
        core: The only core that it may run on.
        unix: Whether it listens on a Unix socket instead of a port; its record is then read after it was stopped.
        port: Port to listen on; 0 takes a free one. A server that is started again names the same port.
    """
    script = script or ServerScript()
    with tempfile.TemporaryDirectory(prefix="maitred-scripted-") as folder:
        log = Path(folder) / "truth.json"
        script_file = Path(folder) / "script.json"
        script_file.write_bytes(msgspec.json.encode(script))
        lifeline, kept = os.pipe()  # see core.parent_watch: the kernel closes this end of the pipe with this process
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", __package__, "--script", f"@{script_file}", "--log", str(log)),
                    *("--port", str(port)),
                    *(["--unix", str(Path(folder) / "http.sock")] if unix else []),
                ],
                stdin=lifeline,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, LIFELINE_VARIABLE: "1"},
            )
        finally:
            os.close(lifeline)
        try:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})
            assert process.stdout is not None
            with process.stdout:
                line = process.stdout.readline()
            if not line.startswith(READY):
                raise RuntimeError(f"The scripted server did not start; it ended with code {process.wait(STOP_S)}.")
            server = ScriptedOpenAI(line.removeprefix(READY).strip(), script, process, log)
            yield server
            server.stop()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            os.close(kept)


def main(arguments: Sequence[str]) -> None:
    """Runs the server as a process, until SIGTERM or until its parent has ended."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--unix", metavar="PATH", help="listen on a Unix socket instead of a port")
    parser.add_argument("--script", default="{}", help="a Script as JSON, or @ and the name of a file that holds it")
    parser.add_argument("--log", type=Path, help="file for what it did, written at its end")
    options = parser.parse_args(arguments)
    text: str = options.script
    source = Path(text[1:]).read_text() if text.startswith("@") else text
    follow_parent()
    try:
        script = msgspec.json.decode(source, type=ServerScript)
    except msgspec.DecodeError as error:
        parser.error(f"The script is not one: {error}.")
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    server = ScriptedServer(script, options.port, options.unix)
    wakeup, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    gc.collect()
    gc.freeze()
    gc.disable()  # closed connections leave no cycles, and a garbage collection would make sends late
    print(f"{READY}{server.url}", flush=True)  # noqa: T201 - what its owner waits for
    server.run(wakeup)
    if options.log is not None:
        options.log.write_bytes(msgspec.json.encode(server.truth()))
