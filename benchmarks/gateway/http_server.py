"""Which HTTP server costs least per plain request and per streamed chunk?

Each candidate runs the same ASGI application, shaped like ours: read a JSON body, then answer at once, or stream chunks
of one token's size. What is compared is the server process's CPU time, because one process on one core is what a
gateway worker is; wall time on a busy machine says more about its other users. Rounds are interleaved, and the figures
are ratios to the first candidate within each round. The bar holds as long as the choice made in
`docs/design/0001-http-server.md` is right: granian, for streams, is not clearly cheaper.

    python -m benchmarks http_server [--quick]    (needs `pip install granian starlette`)
"""

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.support.report import Report
from benchmarks.support.requirements import require_packages

if TYPE_CHECKING:
    from starlette.applications import Starlette

ROUNDS, QUICK_ROUNDS = (7, 8000, 800), (3, 2000, 200)
"""How many, and the plain and streamed requests of each."""
CHUNKS = 64
CHUNK = b"data: " + b'{"id":"chatcmpl-0","choices":[{"index":0,"delta":{"content":" word"}}]}'.ljust(210) + b"\n\n"
_CPU_CLOCK = 2
"""Of a process: what `clock_getcpuclockid` adds to its id."""
BODY = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 1500 + b'"}]}'


async def app(scope: MutableMapping[str, Any], receive: Callable[[], Any], send: Callable[..., Any]) -> None:
    """The application: what `maitred.api` does to a server, without the model behind it."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body", False):
        pass
    if scope["path"] != "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": BODY})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(CHUNKS):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


def routed() -> "Starlette":
    """The same behind Starlette's router and middleware."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def plain(request: Request) -> Response:
        await request.body()
        return Response(BODY, media_type="application/json")

    async def stream(request: Request) -> Response:
        await request.body()

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(CHUNKS):
                yield CHUNK
                await asyncio.sleep(0)

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return Starlette(routes=[Route("/plain", plain, methods=["POST"]), Route("/stream", stream, methods=["POST"])])


def serve_uvicorn(port: int) -> None:
    """The server that the design starts from."""
    import uvicorn

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", lifespan="off", log_level="error", access_log=False)


def serve_starlette(port: int) -> None:
    """uvicorn, with a framework between it and us."""
    import uvicorn

    uvicorn.run(
        routed(), port=port, loop="uvloop", http="httptools", lifespan="off", log_level="error", access_log=False
    )


def serve_granian(port: int) -> None:
    """The rival, written in Rust."""
    from granian import Granian
    from granian.constants import Interfaces, Loops

    Granian(
        "benchmarks.gateway.http_server:app",
        address="127.0.0.1",
        port=port,
        interface=Interfaces.ASGINL,
        loop=Loops.uvloop,
        log_enabled=False,
    ).serve()


SERVERS: dict[str, Callable[[int], None]] = {
    "uvicorn": serve_uvicorn,
    "granian": serve_granian,
    "uvicorn+starlette": serve_starlette,
}


@dataclass
class Server:
    """A candidate that runs."""

    process: subprocess.Popen[bytes]
    port: int

    def cpu_s(self) -> float:
        """CPU time so far, with that of worker processes."""
        root = psutil.Process(self.process.pid)
        return sum(time.clock_gettime((~p.pid << 3) | _CPU_CLOCK) for p in (root, *root.children(recursive=True)))


def start(name: str) -> Server:
    """Starts a candidate and waits until it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.gateway.http_server", "--serve", name, "--port", str(port)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return Server(process, port)
        time.sleep(0.05)
    raise RuntimeError(f"{name} did not start.")


async def load(port: int, path: str, requests: int, connections: int) -> None:
    """Sends requests over kept-alive connections and reads the answers to their last byte."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY

    async def client(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(count):
            writer.write(head)
            header = await reader.readuntil(b"\r\n\r\n")
            if b"chunked" in header.lower():
                rest = b""
                while not rest.endswith(b"\r\n0\r\n\r\n") and rest != b"0\r\n\r\n":
                    rest = rest[-8:] + await reader.read(65536)
            else:
                length = int(header.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*(client(requests // connections) for _ in range(connections)))


def main() -> int:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", choices=SERVERS)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    if arguments.serve:
        SERVERS[arguments.serve](arguments.port)
        return 0
    require_packages("granian", "starlette")
    report = Report("http_server", seed=0, quick=arguments.quick)
    rounds, plain, streams = QUICK_ROUNDS if arguments.quick else ROUNDS
    plans = {"/plain": plain, "/stream": streams}
    servers = {name: start(name) for name in SERVERS}
    cost_us: dict[str, dict[str, list[float]]] = {path: {name: [] for name in SERVERS} for path in plans}
    try:
        for turn in range(rounds + 1):
            for path, requests in plans.items():
                for name, server in servers.items():
                    before_s = server.cpu_s()
                    asyncio.run(load(server.port, path, requests, connections=16))
                    if turn:  # the first round warms up
                        cost_us[path][name].append((server.cpu_s() - before_s) / requests * 1e6)
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait(10)
    for path, costs in cost_us.items():
        for name, values in costs.items():
            ratio = statistics.median(v / b for v, b in zip(values, costs["uvicorn"], strict=True))
            figures = {"cpu_us": round(statistics.median(values), 1), "ratio": round(ratio, 3)}
            report.figures[f"{path} {name}"] = figures
            print(f"{path} {name}: {figures['cpu_us']} µs of CPU per request, {figures['ratio']} x uvicorn")
    report.require("granian / uvicorn, stream", report.figures["/stream granian"]["ratio"], at_least=0.9)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
