"""Readers who open a stream, read its beginning, and then nothing, as behind a network that has gone quiet.

On the loopback device the kernel takes in 840 KB to 4 MB of what nobody reads, which is more than most answers, so that
a server would never notice. Segments as small as a network's and a small receive window leave 160 KB.
"""

import asyncio
import json
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from benchmarks.support.installation import MODEL
from benchmarks.support.single_request import CHAT

TOKENS = 700
SEGMENT_BYTES, WINDOW_BYTES = 1400, 8192
READ_BYTES = 4096
"""Of each stream, before they stop."""


class StalledReaders:
    """Readers who open a stream, read its beginning, and then nothing.

    Args:
        url: Of the server.
        key: That they send.
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._sockets: list[socket.socket] = []
        self._waiting = 0
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me of the river."}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
        data = json.dumps(body).encode()
        self._request = (
            f"POST {CHAT} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        self._readers: list[asyncio.Task[None]] = []

    @property
    def all_stalled(self) -> bool:
        """Whether all of them have read their beginning and stopped."""
        return all(reader.done() for reader in self._readers)

    async def arrive(self, count: int) -> None:
        """All come at once."""
        loop = asyncio.get_running_loop()
        for _ in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            self._sockets.append(sock)
            await loop.sock_connect(sock, self._address)
            await loop.sock_sendall(sock, self._request)
            self._readers.append(asyncio.create_task(self._read_beginning(sock)))

    def leave(self) -> None:
        """They hang up."""
        for reader in self._readers:
            reader.cancel()
        for sock in self._sockets:
            with suppress(OSError):
                sock.close()

    async def _read_beginning(self, sock: socket.socket) -> None:
        loop, read = asyncio.get_running_loop(), 0
        while read < READ_BYTES:
            data = await loop.sock_recv(sock, READ_BYTES)
            if not data:
                return
            read += len(data)
