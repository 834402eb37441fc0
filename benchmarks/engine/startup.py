"""How long it takes from the start of a process to the first token, and how much memory a second engine takes.

Two ways to start: `maitred engine`, asked on its socket, and `maitred serve`, asked over HTTP. *Cold* is the first
start of a model, whose weights are converted and kept; *warm* are those that come after it, of which the median counts.
The files of Numba's kernels and of Python are warm in both: an installation compiles them once. So servers may write
compiled Python here even where the environment says that none is to be written, which costs each start half a second.

Memory is the proportional set size: a page that two processes share counts half for each. So the sum over processes is
what the machine has less of.
"""

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support.report import Report
from benchmarks.support.shapes import BUNDLED, random_qwen, servable
from maitred.core.request import EngineRequest, SamplingParams
from maitred.testing.server_process import free_port
from maitred.wire.frames import EngineHello, FrameReader, Step, Submit, ToGateway, encode_frame

SEED = 20261122
PROMPT = list(range(40, 56))
LIMIT_S = 180.0
ADDITIONS = 10_000_000
WARM_STARTS, QUICK_WARM_STARTS = 3, 2
SETTINGS = ("--kv-memory", "256MiB", "--max-sequences", "32")


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the bundled model alone, two warm starts")
    quick = parser.parse_args().quick
    report = Report("startup", seed=SEED, quick=quick)
    starts = {"bundled": (BUNDLED, "none")}
    if not quick:
        large = servable(random_qwen())
        starts |= {"0.5B": (large, "none"), "0.5B int8": (large, "int8")}
    report.figures["pure_python_s"] = _pure_python_s()
    for name, (model, quantization) in starts.items():
        with TemporaryDirectory(prefix="maitred-startup-") as folder:
            figures = _measured(model, Path(folder), quantization, warm=QUICK_WARM_STARTS if quick else WARM_STARTS)
        report.figures[name] = figures
        print(f"{name:9}", json.dumps(figures))
        report.require(f"{name}: s from `maitred serve` to the first token, warm", figures["serve_warm_s"], at_most=3.0)
    if not quick:
        share = report.figures["0.5B"]["second_engine_share"]
        report.require("0.5B: a second engine, of the first's memory", share, at_most=0.35)
    return report.finish()


def _measured(model: Path, folder: Path, quantization: str, *, warm: int) -> dict[str, Any]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["MAITRED__ENGINE__QUANTIZATION"] = quantization

    def first_token_s() -> float:
        with StartedEngine(model, folder, environment) as engine:
            return engine.first_token_s

    cold_s = first_token_s()
    engine_s = [first_token_s() for _ in range(warm)]
    serve_s = [_served_s(model, environment) for _ in range(warm)]
    with StartedEngine(model, folder, environment) as first:
        alone_mib = first.pss_mib()
        with StartedEngine(model, folder, environment) as second:
            both_mib = first.pss_mib() + second.pss_mib()
    return {
        "engine_cold_s": round(cold_s, 2),
        "engine_warm_s": round(statistics.median(engine_s), 2),
        "engine_warm_each_s": [round(s, 2) for s in engine_s],
        "serve_warm_s": round(statistics.median(serve_s), 2),
        "serve_warm_each_s": [round(s, 2) for s in serve_s],
        "one_engine_mib": round(alone_mib),
        "two_engines_mib": round(both_mib),
        "second_engine_share": round(both_mib / alone_mib - 1, 3),
    }


class StartedEngine:
    """An engine process that has sent its first token; enter it to start it.

    Args:
        model: Its folder.
        folder: For its socket.
        environment: Its variables.

    Attributes:
        first_token_s: From the start of the process.
    """

    def __init__(self, model: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self._path = folder / f"{time.monotonic_ns()}.sock"
        self._command = [
            sys.executable,
            "-m",
            "maitred",
            "engine",
            str(model),
            f"--listen=unix:{self._path}",
            *SETTINGS,
        ]
        self._environment = environment
        self.first_token_s = 0.0

    def __enter__(self) -> "StartedEngine":
        began_s = time.perf_counter()
        self._process = subprocess.Popen(self._command, env=self._environment, stdin=subprocess.DEVNULL)
        try:
            with self._connected(began_s + LIMIT_S) as connection:
                self._await_token(connection)
            self.first_token_s = time.perf_counter() - began_s
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)

    def pss_mib(self) -> float:
        """Its part of the machine's memory."""
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024

    def connected(self) -> socket.socket:
        """A further connection to it."""
        return self._connected(time.perf_counter() + LIMIT_S)

    def _connected(self, until_s: float) -> socket.socket:
        while time.perf_counter() < until_s and self._process.poll() is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(LIMIT_S)
            try:
                connection.connect(str(self._path))
            except OSError:
                connection.close()
                time.sleep(0.005)
            else:
                return connection
        raise RuntimeError("The engine does not listen.")

    def _await_token(self, connection: socket.socket) -> None:
        reader: FrameReader[ToGateway] = FrameReader(ToGateway)
        while True:
            for message in reader.feed(connection.recv(1 << 16)):
                if isinstance(message, EngineHello):
                    request = EngineRequest("first", PROMPT, SamplingParams(max_tokens=1, seed=0))
                    connection.sendall(encode_frame(Submit(request)))
                elif isinstance(message, Step) and any(output.delta.tokens for output in message.outputs):
                    return


def _served_s(model: Path, environment: Mapping[str, str]) -> float:
    """From the start of `maitred serve` to the first token over HTTP."""
    port = free_port()
    command = [sys.executable, "-m", "maitred", "serve", str(model), "--served-name", "model", f"--port={port}"]
    began_s = time.perf_counter()
    nothing = subprocess.DEVNULL
    process = subprocess.Popen([*command, *SETTINGS], env=environment, stdin=nothing, stdout=nothing, stderr=nothing)
    body = json.dumps({"model": "model", "prompt": PROMPT, "max_tokens": 1, "stream": True})
    try:
        while time.perf_counter() - began_s < LIMIT_S and process.poll() is None:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
            try:
                client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                response = client.getresponse()
                if response.status == http.HTTPStatus.OK and response.readline().startswith(b"data: {"):
                    return time.perf_counter() - began_s
            except OSError:
                pass
            finally:
                client.close()
            time.sleep(0.005)
        raise RuntimeError("The server does not answer.")
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def _pure_python_s() -> float:
    """A loop that says how fast the machine is this minute: cores of a shared machine differ by two and more."""
    began_s = time.perf_counter()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return round(time.perf_counter() - began_s, 2)


if __name__ == "__main__":
    sys.exit(main())
