"""Non-blocking connection of one gateway on the engine's side, which exchanges frames.

::

    accepted --TLS--> opened --proofs of the secret--> established: Hello, then frames

Without a certificate the TLS step is skipped; without a secret the proof is skipped. The engine decodes no frame of a
gateway before the connection is established.
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
from maitred.wire.link.handshake import ListenerHandshake

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
"""If a gateway's machine vanishes, its connection ends after 30 s, even if nothing is being sent."""


class GatewayConnection:
    """Connection of one gateway, which owns its requests and buffers its unsent bytes.

    Args:
        sock: Socket that the listener has just accepted.
        credentials: Certificate and secret of the engine, and what it requires from gateways.
        hello: Returns the engine's current hello message.

    Attributes:
        socket: Socket for the selector to watch.
        established: Whether the handshakes are complete, so that the gateway is authenticated.
        unsent: Bytes that the socket has not accepted yet.
        rejections: Rejections that are not yet reported.
        recounts: Whether the gateway has asked for a report of all cached blocks.

    Raises:
        OSError: The gateway has already closed the connection.
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
        self._handshake = ListenerHandshake(credentials.secret, credentials.binding) if credentials.secret else None
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
        """Whether the selector must also watch the socket for write readiness."""
        return bool(self.unsent) or self._waits_to_write

    def open(self) -> None:
        """Sends the first message if there is no TLS; with TLS the gateway starts.

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
        """Queues a message, and sends as many of the queued bytes as the socket accepts now.

        Raises:
            OSError: The connection broke, or the peer has stopped reading.
        """
        self._send_bytes(b"" if message is None else encode_frame(message))

    def send_step(self, outputs: list[TokenOutput], load: LoadReport, blocks: BlockUpdate | None) -> None:
        """Sends the report of a step, with the rejections before it."""
        self._steps += 1
        rejections, self.rejections = self.rejections, []
        self.send(
            Step(
                sequence=self._steps,
                outputs=outputs,
                rejections=rejections,
                load=load,
                submits_heard=self._submits_heard,
                blocks=blocks,
            )
        )

    def _establish(self) -> None:
        self.established = True
        self.send(self._hello())

    def _secure(self) -> bool:
        """Continues the TLS handshake and returns whether it is complete."""
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
        """Reads the bytes that have arrived: None if there are none now, empty at the end of the stream.

        A TLS socket returns one record per call. The selector does not report further records that are buffered behind
        a reported one. So the loop reads until no bytes are left, or until it has enough for one turn.
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
