"""The least that a gateway in Python can be: uvicorn and aiohttp, a look at the key, and bytes passed on.

Neither limits, bills, counts, logs nor reads what it passes on. `benchmarks.gateway.gateways` has it as a reference:
what another one costs beyond this, it costs for what it does.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import uvicorn

Message = dict[str, Any]


class PassThrough:
    """The application.

    Args:
        upstream: Where requests go, without their path.
        key: Who may ask.
    """

    def __init__(self, upstream: str, key: str) -> None:
        self._upstream = upstream
        self._known = {hashlib.sha256(f"Bearer {key}".encode()).digest()}
        self._session: aiohttp.ClientSession | None = None

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Serves one request."""
        credential = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hashlib.sha256(credential).digest() not in self._known:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        sent = {"content-type": "application/json"}
        async with self._session.post(self._upstream + scope["path"], data=body, headers=sent) as answer:
            kept = ("content-type", "content-length")
            headers = [(name.encode(), answer.headers[name].encode()) for name in kept if name in answer.headers]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body"})


def main() -> int:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    uvicorn.run(
        PassThrough(arguments.upstream, os.environ["BENCH_KEY"]),
        port=arguments.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        backlog=4096,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
