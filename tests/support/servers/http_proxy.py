"""A small HTTP proxy, as a process: it makes tunnels and passes requests on, all to one server.

``python -m tests.support.servers.http_proxy TARGET [USER:PASSWORD]`` writes its port and then, for each connection, the
request line that it got, or what it refused it with.
"""

import asyncio
import contextlib
import os
import sys
from base64 import b64encode
from contextlib import asynccontextmanager


@asynccontextmanager
async def http_proxy(target, credentials=""):
    """Runs the proxy; yields its port and the process, whose output tells what it did."""
    words = [sys.executable, "-m", "tests.support.servers.http_proxy", target, credentials]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env={**os.environ})
    try:
        yield int(await process.stdout.readline()), process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def say(line):
    print(line, flush=True)


async def copy(reader, writer):
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(target, wanted, reader, writer):
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if wanted and headers.get("proxy-authorization") != wanted:
        say(f"407 {first}")
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        return
    if "forbidden" in first:
        say(f"403 {first}")
        writer.write(b"HTTP/1.1 403 Forbidden by policy\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        return
    say(first)
    host, _, port = target.rpartition(":")
    server_reader, server_writer = await asyncio.open_connection(host, int(port))
    if first.startswith("CONNECT "):
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    else:
        method, url, version = first.split(" ")
        path = "/" + url.partition("//")[2].partition("/")[2]
        kept = [line for line in lines if not line.lower().startswith(("proxy-", "connection:"))]
        # Each request has a connection of its own, so that no later one passes unread.
        server_writer.write("\r\n".join([f"{method} {path} {version}", "connection: close", *kept]).encode("latin-1"))
    await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))


async def main(target, credentials=""):
    wanted = f"Basic {b64encode(credentials.encode()).decode()}" if credentials else ""
    server = await asyncio.start_server(lambda r, w: serve(target, wanted, r, w), "127.0.0.1", 0)
    say(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
