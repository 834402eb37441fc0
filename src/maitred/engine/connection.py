"""One gateway's connection, as the engine sees it: frames in, frames out, never waiting.

::

    accepted --TLS--> opened --proofs of the secret--> established: Hello, then frames

Each of the two steps is left out where the engine has no certificate, or no secret. Nothing of a gateway's is decoded
before the connection is established.
"""

import socket
import ssl
from collections.abc import Callable

from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport
from maitred.wire.frames import (
    EngineHello,
    FrameReader,
    Rejection,
    Step,
    Submit,
    ToEngine,
    ToGateway,
    TokenOutput,
    encode_frame,
)
from maitred.wire.link.credentials import Credentials
from maitred.wire.link.handshake import EngineHandshake

MAX_UNSENT_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_TCP = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""A gateway whose machine vanishes is gone after 30 s, whether anything is on its way to it or not."""


class GatewayConnection:
    """One gateway: the owner of its requests, and the bytes on their way to it.

    Args:
        sock: As accepted.
        credentials: What the engine asks of gateways, and shows them.
        hello: The engine's, as of now.

    Attributes:
        socket: What to watch.
        established: Whether the gateway has shown that it may be here.
        unsent: What the socket did not take yet.
        rejections: Not yet reported.
        recounts: Whether the gateway wants to be told all blocks that there are.

    Raises:
        OSError: The gateway has gone already.
    """

    def __init__(self, sock: socket.socket, credentials: Credentials, hello: Callable[[], EngineHello]) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            for option in _TCP:
                sock.setsockopt(*option)
        self._tls: ssl.SSLSocket | None = None
        if credentials.tls is not None:
            sock = self._tls = credentials.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._secured = self._tls is None
        self._handshake = EngineHandshake(credentials.secret, credentials.binding) if credentials.secret else None
        self._hello = hello
        self.socket = sock
        self.established = False
        self.unsent = bytearray()
        self.rejections: list[Rejection] = []
        self.recounts = False
        self._waits_to_write = False
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        self._steps = 0
        self._submits_heard = 0

    @property
    def wants_to_write(self) -> bool:
        """Whether to watch for room in the socket, too."""
        return bool(self.unsent) or self._waits_to_write

    def open(self) -> None:
        """Says the first word, where it is ours to say: with TLS it is the gateway's.

        Raises:
            OSError: The connection broke.
        """
        if not self._secured:
            return
        if self._handshake is None:
            self._establish()
        else:
            self._send_bytes(self._handshake.opening)

    def receive(self) -> list[ToEngine] | None:
        """Returns the frames that have arrived; None at the end of the stream.

        Raises:
            OSError: The connection broke, or TLS could not be agreed on.
            ProtocolViolation: The peer sent garbage, or does not know the secret.
        """
        if not self._secured and not self._secure():
            return []
        data = self._read()
        if data is None:
            return []
        if not data:
            return None
        if not self.established:
            assert self._handshake is not None
            proven = self._handshake.feed(data)
            if proven is None:
                return []
            proof, data = proven
            self._send_bytes(proof)
            self._establish()
        messages = self._reader.feed(data)
        self._submits_heard += sum(isinstance(message, Submit) for message in messages)
        return messages

    def send(self, message: ToGateway | None = None) -> None:
        """Sends what the socket takes now of this message and of what is left of earlier ones.

        Raises:
            OSError: The connection broke, or the peer has stopped reading.
        """
        self._send_bytes(b"" if message is None else encode_frame(message))

    def send_step(self, outputs: list[TokenOutput], load: LoadReport, blocks: BlockUpdate | None) -> None:
        """Reports a step and whatever was rejected before it."""
        self._steps += 1
        rejections, self.rejections = self.rejections, []
        self.send(Step(self._steps, outputs, rejections, load, self._submits_heard, blocks))

    def _establish(self) -> None:
        self.established = True
        self.send(self._hello())

    def _secure(self) -> bool:
        """Goes on with the TLS handshake; whether it is over."""
        assert self._tls is not None
        self._waits_to_write = False
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._waits_to_write = True
            return False
        self._secured = True
        self.open()
        return True

    def _read(self) -> bytes | None:
        """Reads the bytes that have arrived: None for nothing now, empty at the end.

        A TLS socket gives one record at a time, and the selector does not see those that lie in the kernel's buffer
        beside one that it has told of; so it is read until there is no more, or enough for one turn.
        """
        read = b""
        while len(read) < _READ_BYTES:
            try:
                data = self.socket.recv(_READ_BYTES)
            except _NOT_NOW:
                return read or None
            read += data
            if not data or self._tls is None:
                break
        return read

    def _send_bytes(self, data: bytes) -> None:
        self.unsent += data
        while self._secured and self.unsent:
            try:
                sent = self.socket.send(self.unsent)
            except _NOT_NOW:
                break
            del self.unsent[:sent]
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise ConnectionAbortedError(f"the gateway left {len(self.unsent)} bytes unread")
